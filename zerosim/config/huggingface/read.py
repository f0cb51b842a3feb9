"""Read a config.json: find the family's row, then the sizes, then each of its rules, then name the rest."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zerosim.config.huggingface.draft import Draft
from zerosim.config.huggingface.families import FAMILIES, Family
from zerosim.config.huggingface.keys import Keys, show
from zerosim.config.huggingface.other_keys import (
    FOREIGN,
    LACKING,
    NESTED,
    NOTED,
    OF_TOWERS,
    TOWERS,
    changes_nothing,
    find,
)
from zerosim.config.inputs import read_json
from zerosim.config.presets.models import ModelPreset, Size, family_sizes
from zerosim.errors import InputError
from zerosim.placement.families import DECODERS

LONGEST_ROW = 4096
"""The most tokens per row if none are given: a file's positions are a limit, not the length of your rows."""


def read_config_json(path: str | Path) -> ModelPreset:
    """Return the model that a local config.json describes; `notes` name the keys that are not modelled.

    Raises: InputError, in one line, for a file that cannot be read or is not JSON, a family or a value that is not
    modelled, a missing key, and a value of the wrong type or one that contradicts others.
    """
    if os.path.isdir(path):
        raise InputError(f"{path} is a directory: pass the file, {Path(path) / 'config.json'}")
    values = read_json(path)
    if not isinstance(values, dict):
        raise InputError(f"{path} holds a JSON {type(values).__name__}: expected an object, {{'model_type': ...}}")
    return model_of(str(path), values)


def model_of(name: str, values: Mapping[str, Any]) -> ModelPreset:
    """Return the model that the keys of a config.json describe. `name` says in errors where they stand."""
    model_type = values.get("model_type")
    if isinstance(model_type, str) and model_type in NESTED:
        return _nested(name, values, NESTED[model_type])
    if isinstance(model_type, str) and model_type in FAMILIES:
        return _decoder(name, values, model_type, FAMILIES[model_type])
    known = f"known are {', '.join([*FAMILIES, *NESTED])}"
    if model_type is None:
        raise InputError(f"{name}: model_type is missing; {known}")
    lacking = find(model_type, LACKING) if isinstance(model_type, str) else ""
    because = f" (it has {lacking})" if lacking else ""
    raise InputError(f"{name}: model_type {show(model_type)} is not modelled{because}; {known}")


def _nested(name: str, values: Mapping[str, Any], otherwise: str) -> ModelPreset:
    """Return the decoder of a model with towers beside it."""
    outer = Keys(name, values, {})
    inner = outer.inner("text_config", {})
    if inner is None:
        raise outer.fail("text_config is missing: the decoder's sizes")
    text = {"model_type": otherwise, **inner.values}
    if outer.value("tie_word_embeddings") is not None:
        text.setdefault("tie_word_embeddings", outer.flag("tie_word_embeddings"))
    found = model_of(inner.name, text)
    notes = (*_beside(outer), *found.notes)
    return ModelPreset(name, found.family, found.sizes, "", None, name, notes, found.decoder, found.numbers)


def _beside(outer: Keys) -> Iterator[str]:
    """Yield the notes on the keys beside text_config."""
    yield from (f"planned without its {words}" for key, words in TOWERS.items() if outer.value(key) is not None)
    unread = [key for key in outer.unread() if not changes_nothing(key) and not find(key, OF_TOWERS)]
    yield from (f"{key}: {words}" for key in unread if (words := find(key, NOTED)))
    if unknown := [key for key in unread if not find(key, NOTED)]:
        yield f"{', '.join(unknown)}: not read, beside text_config"


def _decoder(name: str, values: Mapping[str, Any], model_type: str, family: Family) -> ModelPreset:
    row = family.row or model_type
    keys = Keys(name, values, family.defaults)
    draft = Draft(DECODERS[row], _sizes(keys, family))
    for rule in family.rules:
        draft = rule(keys, draft)
    draft = draft.noted(*_rest(keys, family, model_type, draft.sizes))
    sizes = MappingProxyType(family_sizes(row, draft.sizes))
    own = None if draft.decoder == DECODERS[row] else draft.decoder
    return ModelPreset(name, row, sizes, "", None, name, draft.notes, own, draft.numbers)


def _sizes(keys: Keys, family: Family) -> dict[str, Size]:
    """Return the sizes that the file gives, those of the class, and what follows from them."""
    names = family.names
    for size in ("layers", "hidden", "heads", "ffn", "vocab"):
        others = [key for key in keys.values if OTHER_NAMES.get(key) == size]
        if names[size] and others and not set(others) & {*names[size]} and not keys.knows(names[size][0]):
            raise keys.fail(f"{names[size][0]} is missing; {others[0]} is another family's key")
    sizes: dict[str, Size] = {name: keys.whole(*names[name]) for name in ("layers", "hidden", "heads", "vocab")}
    hidden, heads = int(sizes["hidden"]), int(sizes["heads"])
    own = names["head_dim"] and (keys.given(names["head_dim"])[1] is not None or keys.knows(names["head_dim"][0]))
    if not own and hidden % heads:
        raise keys.fail(f"{heads} heads do not divide hidden size {hidden}")
    sizes["head_dim"] = keys.whole(*names["head_dim"]) if own else hidden // heads
    if names["kv_heads"]:
        kv_heads = keys.whole(*names["kv_heads"], otherwise=heads)
        if heads % kv_heads:
            raise keys.fail(f"{names['kv_heads'][0]} {kv_heads} do not divide {heads} heads")
        sizes["kv_heads"] = kv_heads
    follows = not names["ffn"] or keys.knows(names["ffn"][0])
    sizes["ffn"] = keys.whole(*names["ffn"], otherwise=4 * hidden if follows else None) if names["ffn"] else 4 * hidden
    positions = keys.whole(*names["positions"])
    sizes["seq"], sizes["positions"] = min(positions, LONGEST_ROW), positions
    if names["norm_eps"]:
        sizes["norm_eps"] = keys.number(names["norm_eps"][0])
    sizes["tie_embeddings"] = keys.flag("tie_word_embeddings")
    return sizes


def _rest(keys: Keys, family: Family, model_type: str, sizes: Mapping[str, Size]) -> Iterator[str]:
    """Yield a note for each key that no rule read and that may matter, and one for all that nobody knows."""
    has_longest = DECODERS[family.row or model_type].positions in ("learned", "rotary")
    missing = [
        f"{key} {show(keys.defaults[key])}"
        for size, names in family.names.items()
        for key in names[:1]
        if key in keys.asked and keys.given(names)[1] is None and isinstance(keys.defaults.get(key), int)
        and key != "tie_word_embeddings" and (size != "positions" or has_longest)
    ]  # fmt: skip
    if missing:
        yield f"{', '.join(missing)}: missing in the file, the default of its class"
    unknown = []
    for key, value in keys.unread().items():
        size = OTHER_NAMES.get(key, "")
        if changes_nothing(key) or (size and value == sizes.get(size)) or (key, value) == ("pretraining_tp", 1):
            continue
        if lacking := find(key, FOREIGN):
            if value:
                raise keys.fail(f"{key} {show(value)} is not modelled: a {model_type} has no {lacking}")
        elif size and size not in _LOOSE:
            own = f"its {' or '.join(family.names[size])} is" if family.names[size] else "the other keys mean"
            raise keys.fail(f"{key} {show(value)} is no key of a {model_type}: {own} {sizes.get(size)}")
        elif words := find(key, NOTED):
            if value:
                yield f"{key}{'' if isinstance(value, dict | list) else f' {show(value)}'}: {words}"
        else:
            near = difflib.get_close_matches(key, sorted(keys.asked - keys.values.keys()), 1, 0.85)
            unknown.append(f"{key} (did you mean {near[0]}?)" if near else key)
    if unknown:
        yield f"{', '.join(unknown)}: not read, no {model_type} has such a key"


OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {key: size for family in FAMILIES.values() for size, keys in family.names.items() for key in keys}
    | {"d_model": "hidden", "n_layers": "layers", "n_heads": "heads", "d_ff": "ffn", "num_layers": "layers"}
)
"""The size that a key means in some family."""
_LOOSE = ("norm_eps", "positions")
"""Sizes whose other names are only named in a note."""
