"""Rotary angles: the base, the rotated part of a head, and scalings for longer contexts.

transformers 4 has rope_theta and rope_scaling beside each other, transformers 5 both in rope_parameters; where blocks
with a window have angles of their own, rope_parameters has an object for each kind of block.

Source: modeling_rope_utils.py of huggingface/transformers 5.24.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zerosim.config.huggingface.draft import Draft
from zerosim.config.huggingface.keys import Keys, show
from zerosim.config.numbers import UNSCALED, Scaling

REQUIRED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "yarn": ("factor", "original_max_position_embeddings"),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    }
)
OPTIONAL: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        "longrope": ("attention_factor", "factor"),
    }
)
"""The kinds of scaling, and their values."""

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_rope(keys: Keys, draft: Draft) -> Draft:
    """Read the base, the rotated part of a head, and the scaling. GPT-NeoX has names of its own for the first two; of
    MiniMax-M2's two for the part, rotary_dim counts where the other one is missing."""
    theta = "rotary_emb_base" if keys.knows("rotary_emb_base") else "rope_theta"
    outer = "rotary_pct" if keys.knows("rotary_pct") else "partial_rotary_factor"
    base, found = keys.number(theta), _object(keys)
    local = keys.number("rope_local_base_freq") if keys.knows("rope_local_base_freq") else 0.0
    full, sliding, given = found, None, keys.value(outer)
    if given is None and keys.knows("rotary_dim") and keys.value("rotary_dim") is not None:
        given = part_of_columns(keys, draft)
    if found is not None and {_FULL, _SLIDING} & found.values.keys():
        full, sliding = found.inner(_FULL, {}), found.inner(_SLIDING, {})
    if sliding is not None:
        local = 0.0 if full is not None and full.values == sliding.values else _base(sliding, local or base)
    if full is not None:
        base, given = _base(full, base), full.values.get("partial_rotary_factor", given)
    draft = draft.sized(rope_base=base)
    part = _part(keys, given, outer)
    scaling = UNSCALED if full is None else _scaling(keys, full, int(part * draft.size("head_dim")), draft)
    if sliding is not None and local and _kind(keys, sliding) != "default":
        raise sliding.fail("a scaling of the angles in blocks with a window is not modelled")
    if local and (local != base or scaling != UNSCALED):
        draft = draft.numbered(rope_local=local)
    unread = [
        f"{one.name.removeprefix(f'{keys.name}: ')}: {key}" for one in (found, full) if one for key in one.unread()
    ]
    if unread:
        draft = draft.noted(f"{', '.join(sorted(set(unread)))}: not read, no scaling of rotary angles has it")
    return draft.numbered(rotary_part=part, scaling=scaling)


def _object(keys: Keys) -> Keys | None:
    """Return the object with the parameters. Raises: InputError if rope_parameters and rope_scaling differ."""
    newer, older = keys.inner("rope_parameters", {}), keys.inner("rope_scaling", {})
    if newer is not None and older is not None and newer.values != older.values:
        raise keys.fail("rope_parameters and rope_scaling say different things: keep one")
    return newer or older


def _base(keys: Keys, otherwise: float) -> float:
    keys.asked.add("partial_rotary_factor")
    return keys.number("rope_theta") if keys.value("rope_theta") is not None else otherwise


def _kind(keys: Keys, found: Keys) -> str:
    """Return the name of the scaling. Phi-3's older files call longrope su or yarn."""
    found.asked.update(("rope_type", "type"))
    kind = found.values.get("rope_type", found.values.get("type", "default"))
    if not isinstance(kind, str):
        raise found.fail(f"rope_type {show(kind)}: expected text")
    if kind in ("su", "yarn") and keys.knows("original_max_position_embeddings"):
        return "longrope"
    if kind not in REQUIRED:
        raise found.fail(f"rope_type {show(kind)} is not modelled: expected one of {', '.join(REQUIRED)}")
    return kind


def _scaling(keys: Keys, found: Keys, rotated: int, draft: Draft) -> Scaling:
    kind = _kind(keys, found)
    if kind == "default":  # values of another kind, which transformers leaves there
        found.asked.update(name for names in (*REQUIRED.values(), *OPTIONAL.values()) for name in names)
        return UNSCALED
    values: dict[str, Any] = {}
    for name in (*REQUIRED[kind], *OPTIONAL.get(kind, ())):
        given = found.value(name)
        if name == "original_max_position_embeddings":
            values[name] = _original(keys, given, draft)
        elif given is None and name in REQUIRED[kind]:
            raise found.fail(f"{name} is missing: {kind} needs {', '.join(REQUIRED[kind])}")
        elif given is None:
            continue
        elif name in ("short_factor", "long_factor"):
            values[name] = _each(found, name, given, rotated // 2)
        elif name == "truncate":
            values[name] = found.flag(name)
        else:
            values[name] = found.number(name, low=1.0 if name == "factor" else 0.0)
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if low in values and high in values and values[low] > values[high]:
            raise found.fail(f"{high} {values[high]:g}: expected at least {low} {values[low]:g}")
    return Scaling(kind, tuple(values.items()))


def _original(keys: Keys, given: Any, draft: Draft) -> float:
    """Return the positions of the first training; the key beside the object comes first, as in transformers."""
    name, positions = "original_max_position_embeddings", draft.size("positions")
    outer = keys.value(name)
    value = given if outer is None else outer
    value = positions if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= positions:
        raise keys.fail(f"{name} {show(value)}: expected a whole number from 1 to the {positions} positions")
    return float(value)


def _each(found: Keys, name: str, given: object, pairs: int) -> tuple[float, ...]:
    if not isinstance(given, list) or len(given) != pairs:
        size = f"{len(given)} numbers" if isinstance(given, list) else show(given)
        raise found.fail(f"{name} {size}: expected a list of {pairs}, one for each pair of rotated columns")
    return tuple(Keys(found.name, {name: one}, {}).number(name) for one in given)


def part_of_columns(keys: Keys, draft: Draft) -> float:
    """Return the part of a head's columns that rotary_dim says."""
    columns, head_dim = keys.whole("rotary_dim"), draft.size("head_dim")
    if columns > head_dim:
        raise keys.fail(f"rotary_dim {columns}: more than the {head_dim} columns of a head")
    part = columns / head_dim
    return part if int(head_dim * part) == columns else math.nextafter(part, 1.0)


def _part(keys: Keys, given: object, key: str) -> float:
    """Return the part of a head's columns that is rotated."""
    if given is None or (given == 1 and not isinstance(given, bool)):
        return 1.0
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < 1:
        raise keys.fail(f"{key} {show(given)}: expected a part in (0, 1]")
    if not keys.knows(key):
        raise keys.fail(f"{key} {show(given)}: this family rotates whole heads")
    return float(given)
