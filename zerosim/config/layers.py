"""From given values to all values: layers of defaults, and options that exclude one another.

The lowest layer is the options' own defaults, which are the paper's. Over it lie the precision's values, the recipe's
row for this ZeRO stage and precision, the optimizer's row, and the given values. If two values exclude each other, the
recipe's is set aside. Two given ones, or a given one and one of the optimizer's, are refused. Then each capability
settles its own values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerosim.config.option import Draft, shown
from zerosim.config.parts import CAPABILITIES, OPTIONS
from zerosim.config.parts.precision import PURE
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.config.presets.recipes import find_recipe, usual_recipe
from zerosim.errors import wrong


def resolve(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values by flat name that may differ from the defaults, and in words the recipe's values that were set
    aside.

    Raises: InputError for an option that this ZeRO stage or optimizer does not have, and for values that exclude each
    other.
    """
    names = "stage", "recipe", "precision", "optimizer", "tp", "pp"
    stage, asked, precision, optimizer, tp, pp = (given.get(name, OPTIONS[name].default) for name in names)
    stored = "bf16" if precision == PURE else precision
    recipe = find_recipe(asked, usual_recipe(stage, is_cut=tp * pp > 1, is_pure=precision == PURE))
    layers: dict[str, Mapping[str, Any]] = {  # by source, the lowest first
        precision: {
            "grad_dtype": stored,
            "rounding": "nearest" if precision == PURE else None,
            "loss_scale": "dynamic" if precision == "fp16" else None,
        },
        f"recipe {recipe.name}": recipe.row(stage, precision, transformer_engine=given.get("transformer_engine")),
        optimizer: OPTIMIZERS[optimizer].row(follows_lr="lr" not in given),
    }
    values, source = dict[str, Any](), dict[str, str]()
    for who, row in layers.items():
        values |= row
        source |= dict.fromkeys(row, who)
    _check_given(given, stage, optimizer, values)
    values |= {**given, "recipe": recipe.name}
    source |= dict.fromkeys(given, "")
    draft = Draft(values, source, given, stage)
    set_aside = _exclude(draft)
    for capability in CAPABILITIES:
        set_aside |= capability.settles(draft)
    return values, set_aside


def _exclude(draft: Draft) -> dict[str, str]:
    """Take the recipe's losing values out. Return which, and why. Raises: InputError."""
    values, source, _, stage = draft

    def is_on(name: str) -> bool:
        return bool(values.get(name, OPTIONS[name].default) != OPTIONS[name].default)

    set_aside: dict[str, str] = {}
    for first, second, why, stages, needs in (each for one in CAPABILITIES for each in one.exclusions):
        if stage not in stages or not is_on(first) or is_on(second) == needs:
            continue
        wins, loses = (first, second) if not needs and source[second].startswith("recipe ") else (second, first)
        by = f", which {source[wins]} sets" if not needs and source[wins] else ""
        reason = f"it has no effect without {wins}" if needs else f"not with {wins}{shown(values[wins])}{by}: {why}"
        if not source[loses]:
            remedy = "pass it too, or leave this out" if needs else "leave one of them out"
            raise wrong(loses, f"{shown(values[loses])}: {reason}; {remedy}", beside=wins)
        set_aside |= draft.without(loses, reason)
    return set_aside


def _check_given(given: Mapping[str, Any], stage: int, optimizer: str, rows: Mapping[str, Any]) -> None:
    """Check given options that this ZeRO stage or this optimizer does not have. Raises: InputError."""
    for name, value in given.items():
        if stage not in (stages := OPTIONS[name].stages) and value not in (OPTIONS[name].default, rows.get(name)):
            right = " or ".join(map(str, stages))
            raise wrong(name, f"{shown(value)}: stage {stage} does not use it; leave it out, or choose stage {right}")
    own = OPTIMIZERS[optimizer]
    choose = {"momentum": "; choose sgd", "aux_lr": ", only lr; leave it out, or choose muon"}
    for name in ("betas", "eps", "momentum", "aux_lr"):
        if given.get(name) and getattr(own, name) is None:
            has = ", it has betas" if name == "momentum" and own.betas is not None else ""
            raise wrong(name, f" {given[name]}: {optimizer} has no {name}{has}{choose.get(name, '; leave it out')}")
