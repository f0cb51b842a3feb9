"""torchtitan's [quantize]: linear maps in 8 bits by torchao, with a converter's name in model.converters.

Read in torchtitan 0.2.2, components/quantization/float8.py and mx.py, and torchao 0.18, float8/config.py.
"""

from __future__ import annotations

import re

from zerosim.config import RunConfig
from zerosim.dialects.fp8 import RECIPES, gathers_codes
from zerosim.dialects.torchtitan.mesh import BY, Setup

FLOAT8, MX = "quantize.linear.float8", "quantize.linear.mx"
CONVERTERS = {FLOAT8: FLOAT8, MX: MX, "float8": FLOAT8, "mx": MX}
"""By a converter's name, its section. The short names are those of torchtitan 0.1."""
_EXPERTS = ("quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
ROUNDINGS = {"mxfp8_cublas": "floor", "mxfp8_cublas_rceil": "rceil", "mxfp8_emulated": "floor"}
"""By torchao's recipe for MX, how scales are rounded."""
_NO_BLOCKS = ("output", "router.gate")
"""Names of filter_fqns that are no part of a block's linear maps here: the head, and the router of experts."""
_ONCE = (
    "Without precompute_float8_dynamic_scale_for_fsdp torchao all-reduces a scale of each weight before its gather; "
    "zerosim all-reduces the scales of a unit once, after the update."
)
_BLOCK = re.compile(r"layers\.(\d+)\.?")


def quantized(setup: Setup) -> None:
    """Set the products of a converter of linear maps."""
    notes, names = setup.notes, setup.keys["model.converters"]
    sections = list(dict.fromkeys(CONVERTERS[name] for name in names if name in CONVERTERS))
    if not names:
        notes.tell("model.converters", "understood", "none")
    elif unknown := [name for name in names if name not in CONVERTERS]:
        is_experts = unknown[0] in _EXPERTS
        what = "experts' maps in 8 bits" if is_experts else "this converter"
        advice = "" if not is_experts else "leave it out: --fp8 leaves experts in 16 bits"
        notes.lacks("model.converters", f"{unknown[0]}: {what}", costs=True, advice=advice)
    elif len(sections) > 1:
        why = "float8 and mx: one of them can convert a linear map"
        notes.refuse("model.converters", "zerosim", why, "keep one of them")
    elif sections == [FLOAT8]:
        _float8(setup)
    else:
        _mx(setup)
    if short := [name for name in names if CONVERTERS.get(name, name) != name]:
        notes.note(f"torchtitan 0.2 registers {short[0]} as {CONVERTERS[short[0]]}: write that name.")
    for key in notes.document.keys:
        if not key.startswith("quantize.") or key not in notes.rows or key in notes.said:
            continue
        if key.rpartition(".")[0] in (*names, *sections):
            notes.tell(key, "lacking", f"with model.converters {names}")
        else:
            why = "model.converters does not name its converter" if names else "model.converters names no converter"
            notes.tell(key, "ignored", f"{why}, so nothing is quantised")


def _float8(setup: Setup) -> None:
    notes, keys = setup.notes, setup.keys
    name, gather = f"{FLOAT8}.recipe_name", f"{FLOAT8}.enable_fsdp_float8_all_gather"
    recipe = keys[name]
    notes.sets(name if recipe else "model.converters", **RECIPES.get(recipe or "tensorwise", {}))
    if recipe is not None and recipe not in RECIPES:
        why = f"AssertionError: recipe_name {recipe} not in valid names {list(RECIPES)}"
        notes.refuse(name, BY, why, "write tensorwise or rowwise")
    notes.tell("model.converters", "understood", "torchao's Float8Linear in blocks")
    filtered(setup, f"{FLOAT8}.filter_fqns")
    if recipe is not None and keys[gather]:
        why = "AssertionError: enable_fsdp_float8_all_gather together with recipe_name is not supported"
        notes.refuse(f"{name}, {gather}", BY, why, "leave recipe_name out, which is tensorwise")
    elif setup.degrees.shard != 1:
        gathers_codes(notes, gather, is_on=keys[gather])
    else:
        notes.tell(gather, "ignored", "one rank along dp_shard: nothing is gathered in 8 bits")
    once = f"{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp"
    if "fp8_gather" not in notes.values:
        notes.tell(once, "ignored", "its one all-reduce for all scales is of gathers in 8 bits")
    elif keys[once]:
        notes.tell(once, "understood", "after an update one all-reduce for the scales of each unit")
    else:
        notes.tell(once, "understood", "off")
        notes.note(_ONCE)
    if keys[f"{FLOAT8}.emulate"]:
        notes.lacks(f"{FLOAT8}.emulate", "the same values by 16-bit products, for tests", costs=False)
    else:
        notes.tell(f"{FLOAT8}.emulate", "understood", "products in 8 bits")


def _mx(setup: Setup) -> None:
    notes, keys, name = setup.notes, setup.keys, f"{MX}.recipe_name"
    recipe = keys[name]
    if recipe not in ROUNDINGS:
        fours = "fp4" in recipe
        why = f"{recipe}: training in 4 bits is not modelled" if fours else f"{recipe}: none of torchao's recipes"
        notes.refuse(name, "zerosim", why, f"write one of {', '.join(ROUNDINGS)}")
    if keys["compile.enable"] and "model" in keys["compile.components"] and setup.degrees.tp > 1:
        why = "AssertionError: TP not yet supported with torch.compile for mxfp8"
        notes.refuse("compile.enable", BY, why, 'write components = ["loss"], or tensor_parallel_degree = 1')
    rounding = {} if ROUNDINGS.get(recipe, "floor") == "floor" else {"mx_rounding": ROUNDINGS[recipe]}
    key = name if setup.has(name) else "model.converters"
    notes.sets(key, fp8="mxfp8", fp8_library="torchao", **rounding)
    notes.tell("model.converters", "understood", "torchao's MXLinear in blocks")
    filtered(setup, f"{MX}.filter_fqns")
    notes.tell(f"{MX}.mxfp8_dim1_cast_kernel_choice", "ignored", "the same bytes by another kernel")


def filtered(setup: Setup, key: str) -> None:
    """Set the blocks that stay in 16 bits, from parts of names such as layers.0."""
    notes, parts, layers = setup.notes, setup.keys[key], setup.layers
    named = [one for one in parts if _BLOCK.fullmatch(one)]
    exact = [block for block in range(layers) if any(one in f"layers.{block}." for one in named)]
    first = next((index for index, block in enumerate(exact) if block != index), len(exact))
    last = len(exact) - first
    advice = f"--without {key} plans all blocks in 8 bits"
    if rest := [one for one in parts if one not in (*_NO_BLOCKS, *named)]:
        notes.lacks(key, f"{', '.join(rest)}: some maps of a block stay in 16 bits", costs=True, advice=advice)
    elif named and not layers:
        notes.lacks(key, f"{', '.join(named)}: blocks of an unknown model", costs=True, advice="pass --model")
    elif exact[first:] != list(range(layers - last, layers)):
        why = f"{', '.join(named)}: blocks that are neither the first nor the last ones stay in 16 bits"
        notes.lacks(key, why, costs=True, advice=advice)
    else:
        counts = {"fp8_exact_first": first, "fp8_exact_last": last}
        values = {name: count for name, count in counts.items() if count}
        setup.sets(key, "zerosim's head and routers are always in 16 bits", **values)
    if "output" not in parts:
        notes.note("Without output in filter_fqns torchtitan converts the head too; zerosim's head stays in 16 bits.")


def filters_of(config: RunConfig, head: str = "output") -> list[str]:
    """Return filter_fqns with which the head, the routers of experts and the first and last blocks stay in 16 bits."""
    layers, first, last = config.model.layers, config.fp8.exact_first, config.fp8.exact_last
    routers = ["router.gate"] if config.model.has_experts else []
    return [head, *routers, *(f"layers.{block}." for block in (*range(first), *range(layers - last, layers)))]
