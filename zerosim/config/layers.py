"""From given values to all values: layers of defaults, and options that exclude one another.

The lowest layer is the options' own defaults, which are the paper's. Over it lie the precision's values, the recipe's
row for this ZeRO stage and precision, the optimizer's row, and the given values. If two values exclude each other, the
recipe's is set aside. Two given ones, or a given one and one of the optimizer's, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerosim.config.parts import CAPABILITIES, OPTIONS
from zerosim.config.parts.buckets import BUCKET
from zerosim.config.parts.offload import OffloadConfig
from zerosim.config.parts.precision import PURE
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.config.presets.recipes import find_recipe, usual_recipe
from zerosim.errors import wrong
from zerosim.placement.memories import NVME


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
        f"recipe {recipe.name}": recipe.row(stage, stored, transformer_engine=given.get("transformer_engine")),
        optimizer: OPTIMIZERS[optimizer].row(follows_lr="lr" not in given),
    }
    values, source = dict[str, Any](), dict[str, str]()
    for who, row in layers.items():
        values |= row
        source |= dict.fromkeys(row, who)
    _check_given(given, stage, optimizer, values)
    values |= {**given, "recipe": recipe.name}
    source |= dict.fromkeys(given, "")
    set_aside = _exclude(values, source, stage) | _off_device(values, source)
    if (ranks := given.get("ranks", OPTIONS["ranks"].default)) == tp * pp:
        set_aside |= _on_one_rank(values, source, ranks)
    if precision == PURE and (masters := next((n for n in ("cast_shards", "upcast_grads") if values.get(n)), "")):
        who, right = source[masters] or masters, "choose recipe paper" if source[masters] else f"leave out {masters}"
        raise wrong(
            "precision", f" {PURE!r}: {who} needs fp32 masters, and this precision has none; {right}, or use bf16"
        )
    _overlap(values, given, stage)
    wish, bucket = given.get("overlap"), values.get("allgather_bucket")
    if wish == "gather" and stage == 0:
        set_aside["overlap"] = "overlap 'gather', stage 0 gathers nothing"
    elif wish in ("gather", "all") and stage in (1, 2) and bucket:
        set_aside["overlap"] = f"overlap {wish!r}, not with allgather_bucket {bucket}: {BUCKET}"
    return values, set_aside


def _off_device(values: dict[str, Any], source: Mapping[str, str]) -> dict[str, str]:
    """Take a recipe's gradient buffer that stays on the device out of `values`, if gradients lie on NVMe. Return
    why."""
    name, offload = "persistent_grads", OffloadConfig(where=values.get("offload", ""))
    if offload.memory_of("grads") != NVME or not values.get(name) or not source[name]:
        return {}
    del values[name]
    return {
        name: f"{source[name]}'s {name}, not with offload {offload.where!r}: gradients on NVMe have no permanent buffer"
    }


def _on_one_rank(values: dict[str, Any], source: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Take a recipe's DDP buckets out of `values`, where one of the `ranks` has all of the data. Return why."""
    name = "grad_buckets"
    if name not in values or not source[name]:
        return {}
    buckets = f"{source[name]}'s {name} {values.pop(name)!r}"
    return {name: f"{buckets}, not with ranks {ranks}: nobody wraps a model in DDP for one data-parallel rank"}


def _exclude(values: dict[str, Any], source: Mapping[str, str], stage: int) -> dict[str, str]:
    """Take the recipe's losing values out of `values`. Return which, and why. Raises: InputError."""

    def is_on(name: str) -> bool:
        return bool(values.get(name, OPTIONS[name].default) != OPTIONS[name].default)

    set_aside: dict[str, str] = {}
    for first, second, why, stages, needs in (each for one in CAPABILITIES for each in one.exclusions):
        if stage not in stages or not is_on(first) or is_on(second) == needs:
            continue
        wins, loses = (first, second) if not needs and source[second].startswith("recipe ") else (second, first)
        by = f", which {source[wins]} sets" if not needs and source[wins] else ""
        reason = f"it has no effect without {wins}" if needs else f"not with {wins}{_shown(values[wins])}{by}: {why}"
        if not source[loses]:
            remedy = "pass it too, or leave this out" if needs else "leave one of them out"
            raise wrong(loses, f"{_shown(values[loses])}: {reason}; {remedy}", beside=wins)
        set_aside[loses] = f"{source[loses]}'s {loses}{_shown(values[loses])}, {reason}"
        del values[loses]
    return set_aside


def _shown(value: Any) -> str:
    """Return a value behind its option's name; nothing if the name alone says it."""
    return "" if value is True else f" {value!r}"


def _overlap(values: dict[str, Any], given: Mapping[str, Any], stage: int) -> None:
    """Set in detail what `--overlap` asks for, except given details. Return what overlaps in the end."""
    wish, has_bucket = given.get("overlap"), bool(values.get("reduce_bucket"))
    if wish is not None:
        reduces, gathers = wish in ("reduce", "all"), wish in ("gather", "all")
        row = {"overlap_reduction": reduces and not has_bucket, "reduce_buffers": 1 + (reduces and has_bucket)}
        if not reduces:
            row["overlap_comm"] = False
        if stage == 3 and not (gathers and values.get("prefetch_elements")):
            row |= {"prefetch": int(gathers), "prefetch_elements": 0, "max_live": 0}
        if stage in (1, 2):
            row["overlap_param_gather"] = gathers and not values.get("allgather_bucket")
        values |= {name: value for name, value in row.items() if name not in given}
    reduces = values.get("reduce_buffers") == 2 if has_bucket else bool(values.get("overlap_reduction"))
    gathers = any(values.get(name) for name in ("prefetch", "prefetch_elements", "overlap_param_gather"))
    values["overlap"] = ("none", "reduce", "gather", "all")[reduces + 2 * gathers]


def _check_given(given: Mapping[str, Any], stage: int, optimizer: str, rows: Mapping[str, Any]) -> None:
    """Check given options that this ZeRO stage or this optimizer does not have. Raises: InputError."""
    for name, value in given.items():
        if stage not in (stages := OPTIONS[name].stages) and value not in (OPTIONS[name].default, rows.get(name)):
            right = " or ".join(map(str, stages))
            raise wrong(name, f"{_shown(value)}: stage {stage} does not use it; leave it out, or choose stage {right}")
    own = OPTIMIZERS[optimizer]
    choose = {"momentum": "; choose sgd", "aux_lr": ", only lr; leave it out, or choose muon"}
    for name in ("betas", "eps", "momentum", "aux_lr"):
        if given.get(name) and getattr(own, name) is None:
            has = ", it has betas" if name == "momentum" and own.betas is not None else ""
            raise wrong(name, f" {given[name]}: {optimizer} has no {name}{has}{choose.get(name, '; leave it out')}")
