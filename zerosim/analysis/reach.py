"""Find how far backward goes with frozen parameters, and which gathers, exchanges and messages remain.

This uses the layout alone and the rules of the architecture: backward runs through a unit if it or an earlier unit is
trained. A map's input has a gradient if anything before the map is trained. This module reads no count of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerosim.analysis.shares import Placed, Share
from zerosim.functional.loss_modes import CHUNKED
from zerosim.placement.spec import is_block, unit_of

_NORMS = (("ln_1", "input_layernorm"), ("ln_2", "post_attention_layernorm"))
_COLUMNS = (("attn.c_attn", "attn.q", "attn.k", "attn.v", *(f"self_attn.{one}_proj" for one in "qkv")),
            ("mlp.c_fc", "mlp.gate_proj", "mlp.up_proj"))  # fmt: skip
_ROWS = (("attn.c_proj", "self_attn.o_proj"), ("mlp.c_proj", "mlp.down_proj"))
"""Layers of a block's two branches, attention and feed-forward, under the names of each family."""


class Reach(NamedTuple):
    """The extent of a pipeline stage's backward, in the letters of `formulas/letters.py`.

    units   the units of each chunk that backward reaches, in the order of forward, and whether the gradient of their
            input is needed
    """

    units: Sequence[tuple[tuple[str, bool], ...]]
    x: int
    y: int
    z: int
    k: int
    j: int


def reach_of(placed: Placed, share: Share) -> Reach:
    """Return the extent of backward on a pipeline stage."""
    layout, config = placed.layout, placed.config
    names = {unit: [n for n in layout.flats if layout.flats[n].unit == unit] for unit in _units(placed)}
    trained = {unit for unit, flats in names.items() if any(map(layout.is_trained, flats))}
    order = _units(placed)
    if placed.tied_numel:
        order.append(order[0])  # the head is the table's second use
    lowest = next((at for at, unit in enumerate(order) if unit in trained), len(order))
    backs, x, y, z, k, j = list[tuple[tuple[str, bool], ...]](), 0, 0, 0, 0, 0
    chunks = _chunks(placed, share, order)
    for number, (first, units) in chunks.items():
        backs.append(tuple((unit, at > lowest) for at, unit in enumerate(units, first) if at >= lowest))
        turns = config.chunks.stages * config.parallel.num_chunks > 1 and number > 0
        local = turns and number - 1 in chunks  # zb-v turns on a stage without a message
        j += first > lowest and number > 0 and not local
        for at, unit in enumerate(units, first):
            if at < lowest:
                continue
            if is_block(unit):
                of_block = _trained_layers(placed, unit)
                more = _in_block(of_block, sends_back=at > lowest)
                x, y, z, k = x + more[0], y + more[1], z + more[2], k + 1
            elif at == len(order) - 1:
                x, z = x + (at > lowest), z + (unit in trained or config.memory.loss == CHUNKED)  # it runs again
            elif at == 0:
                y += 1
    return Reach(backs, x, y, z, k, j)


def gathered_again(placed: Placed, unit: str, *, sends_back: bool) -> list[str]:
    """Return the flat buffers that a unit's backward reads: by unit all of them; by module, those of each leaf from the
    first one that computes or passes on a gradient."""
    layout, found = placed.layout, list[str]()
    for name, flat in layout.flats.items():
        if flat.unit == unit:
            same = [other for other, one in layout.flats.items() if one.module == flat.module]
            sends_back |= any(map(layout.is_trained, same))
            if sends_back or flat.module == unit:
                found.append(name)
    return found


def run_again(placed: Placed, unit: str, *, sends_back: bool) -> set[str]:
    """Return the leaf modules of a block whose results backward reads: those that it recomputes if they are discarded.
    A norm's result is read for weight gradients of the maps behind it; the sum before the second norm by that norm; the
    first map of the feed-forward by its activation."""
    trained, parts = _trained_layers(placed, unit), placed.config.memory.again.parts
    reads = [not _reading(placed, unit).isdisjoint(columns) for columns in _COLUMNS]
    flows = sends_back or not trained.isdisjoint((*_NORMS[0], *_COLUMNS[0], *_ROWS[0], *_NORMS[1]))
    maps = flows or not trained.isdisjoint((*_COLUMNS[1], *_ROWS[1]))
    second = reads[1] or (maps and "fc1" in parts)
    added = flows or (second and "layernorm" in parts)
    layers = (reads[0], _NORMS[0]), (added, _ROWS[0]), (second, _NORMS[1]), (maps, (*_COLUMNS[1], "mlp.gate_up_proj"))
    return {layer for is_read, same in layers if is_read for layer in same}


def _reading(placed: Placed, unit: str) -> set[str]:
    """Return the maps of a block with a trained weight whose gradient reads the map's input: all but adapters' B and
    biases."""
    return _trained_layers(placed, unit, without=(".lora_B.", ".bias"))


def _units(placed: Placed) -> list[str]:
    return list(dict.fromkeys(flat.unit for flat in placed.layout.flats.values()))


def _chunks(placed: Placed, share: Share, order: Sequence[str]) -> Mapping[int, tuple[int, tuple[str, ...]]]:
    """Return the pipeline stage's chunks by number, each with the position of its first unit in the model."""
    numbers, found, at = placed.config.chunks.of_stage(share.stage), {}, 0
    for number, units in zip(numbers, share.chunks, strict=True):
        if units:  # a chunk that begins with the tied table's second use begins at the end
            at = len(order) - 1 if number and units[0] == order[0] else order.index(units[0])
        found[number] = at, units
    return found


def _trained_layers(placed: Placed, unit: str, without: Sequence[str] = ()) -> set[str]:
    """Return the layers of a block with trained weights, including adapters; of those whose names hold one of
    `without` none."""
    layout, found = placed.layout, set[str]()
    for name, flat in layout.flats.items():
        if flat.unit == unit and layout.is_trained(name):
            for weight in (one for one in flat.weights if not any(part in one.name for part in without)):
                head = unit_of(weight.name)
                layer = weight.name[weight.name.index(f"{unit}.") + len(unit) + 1 :] if head else weight.name
                found.add(layer.partition(".lora_")[0].removesuffix(".weight").removesuffix(".bias"))
    return found


def _in_block(trained: set[str], *, sends_back: bool) -> tuple[int, int, int]:
    """Count in one block: inputs of column-parallel maps that need a gradient, row-parallel maps that backward
    reaches, and column-parallel maps that need their input for weights' gradients."""
    x = y = z = 0
    flows = sends_back  # whether the residual stream has a gradient
    for norms, columns, rows in zip(_NORMS, _COLUMNS, _ROWS, strict=True):
        inner = flows or not trained.isdisjoint(norms)
        x += inner
        z += not trained.isdisjoint(columns)
        inner = inner or not trained.isdisjoint((*columns, *rows))
        y += inner
        flows |= inner
    return x, y, z
