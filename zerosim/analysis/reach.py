"""Find how far backward goes with frozen parameters, and which gathers, exchanges and messages remain.

This uses the layout alone and the rules of the architecture: backward runs through a unit if it or an earlier unit is
trained. A map's input has a gradient if anything before the map is trained. This module reads no count of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from zerosim.analysis.facts import experts_in
from zerosim.analysis.recompute import differ, is_wrapped, parts_again
from zerosim.analysis.shares import Placed, Share, units_of
from zerosim.config import ModelConfig
from zerosim.config.parts.tuning import is_adapter
from zerosim.functional.liger_loss import LIGER
from zerosim.functional.loss_modes import CHUNKED
from zerosim.placement.block import BOTH, KV, WAYS, Role
from zerosim.placement.spec import FlatSpec, is_block
from zerosim.train.check_trained import is_of_experts

Number = int | Fraction
Place = tuple[int, str]
"""A layer of a block: the number of its branch, and what it is in it (`placement/block.py`, Role)."""


class Reach(NamedTuple):
    """The extent of a pipeline stage's backward, in the letters of `formulas/letters.py`.

    units   the units of each chunk that backward reaches, in the order of forward, and whether the gradient of their
            input is needed
    """

    units: Sequence[tuple[tuple[str, bool], ...]]
    x: Number
    y: int
    z: Number
    y_q: int
    x_e: int
    y_e: int
    k_f: int
    k_g: int
    k_u: int
    k_a: int
    j: int


def reach_of(placed: Placed, share: Share) -> Reach:
    """Return the extent of backward on a pipeline stage."""
    layout, config = placed.layout, placed.config
    names = {unit: [n for n in layout.flats if layout.flats[n].unit == unit] for unit in units_of(placed)}
    trained = {unit for unit, flats in names.items() if any(map(layout.is_trained, flats))}
    order = units_of(placed)
    if placed.tied_numel:
        order.append(order[0])  # the head is the table's second use
    lowest = next((at for at, unit in enumerate(order) if unit in trained), len(order))
    backs, x, y, z = list[tuple[tuple[str, bool], ...]](), Fraction(0), 0, Fraction(0)
    y_q = x_e = y_e = k_f = k_g = k_u = k_a = j = 0
    lie = experts_in(config)
    chunks = _chunks(placed, share, order)
    for number, (first, units) in chunks.items():
        flows = {unit: at > lowest or _has_leaf(placed, unit) for at, unit in enumerate(units, first)}
        backs.append(tuple((unit, flows[unit]) for at, unit in enumerate(units, first) if at >= lowest))
        turns = number > 0
        local = turns and number - 1 in chunks  # zb-v turns on a stage without a message
        j += first > lowest and number > 0 and not local
        for at, unit in enumerate(units, first):
            if at < lowest or not config.model.has_blocks:
                continue
            if is_block(unit):
                row, found = config.model.block_of(unit), _trained_in(placed, unit)
                weights = [weight for n in names[unit] if layout.is_trained(n) for weight in layout.flats[n].weights]
                own = any(is_of_experts(config.model, weight.name) for weight in weights)
                shared: set[Place] = {
                    weight.role[:2]
                    for weight in weights
                    if weight.role is not None and not is_of_experts(config.model, weight.name)
                }
                back = flows[unit]
                more = _in_block(config.model, unit, found, shared, sends_back=back, lie=lie, trains_experts=own)
                x, y, z, y_q = x + more[0], y + more[1], z + more[2], y_q + more[3]
                x_e, y_e = x_e + more[4], y_e + more[5]
                again = run_again(placed, unit, sends_back=back)
                parts = parts_again(config, unit)
                mlp, rows = ("fc1" in parts, "attn_proj" in parts) if differ(config) else (True, True)
                k_f += mlp and (1, "columns") in again and (lie == "beside" or row.mlp.experts is None)
                k_g += rows and (0, "rows") in again
                k_u, k_a = k_u + more[3] * ("mla_up" in parts), k_a + more[3] * ("core_attn" in parts)
            elif at == len(order) - 1:
                reads = unit in trained and config.memory.loss not in LIGER
                x, z = x + (at > lowest), z + (reads or config.memory.loss == CHUNKED)  # it runs again
            elif at == 0:
                y += 1
    return Reach(backs, x, y, z, y_q, x_e, y_e, k_f, k_g, k_u, k_a, j)


def _has_leaf(placed: Placed, unit: str) -> bool:
    """Return whether a block's input is a leaf with a gradient, whatever lies below: in a reentrant checkpoint around a
    block that trains adapters alone (`nn/retained.py`)."""
    if not (placed.config.memory.use_reentrant and is_block(unit) and is_wrapped(placed.config, unit)):
        return False
    flats = (flat for flat in placed.layout.flats.values() if flat.unit == unit and flat.is_trained)
    return all(is_adapter(weight.name) for flat in flats for weight in flat.weights)


def gathered_again(placed: Placed, unit: str, *, sends_back: bool) -> list[str]:
    """Return the flat buffers that a unit's backward reads: by unit all of them; by module, those of each leaf from the
    first one that computes or passes on a gradient. Side by side, each branch has a first one."""
    layout, found = placed.layout, list[str]()
    row = placed.config.model.block_of(unit) if is_block(unit) and placed.config.model.has_blocks else None
    flows = dict.fromkeys(WAYS, sends_back)
    for name, flat in layout.flats.items():
        if flat.unit != unit:
            continue
        roles = roles_in(flat)
        branches = {at for role in roles for at in row.reached_from(*role)} if row is not None and roles else {*BOTH}
        same = [other for other, one in layout.flats.items() if one.module == flat.module]
        trained = any(map(layout.is_trained, same))
        if trained or any(flows[at] for at in branches) or flat.module == unit:
            found.append(name)
        flows |= {at: True for at in branches if trained}
    return found


def run_again(placed: Placed, unit: str, *, sends_back: bool) -> set[Place]:
    """Return the leaf modules of a block whose results backward reads: those that it recomputes if they are discarded.

    A norm's result is read for weight gradients of the maps behind it; the sum after attention by the second norm or,
    without one, as a norm's result; a map before a norm by that norm; the first map of the feed-forward by its
    activation. Side by side no norm reads the sum. Cross-attention's norm reads the sum after attention.
    """
    if not placed.config.model.has_blocks:
        return set()
    row, parts = placed.config.model.block_of(unit), parts_again(placed.config, unit)
    trained, reading = _trained_in(placed, unit), _trained_in(placed, unit, reading=True)
    queries = sends_back or not trained.isdisjoint(_places(0, "before", *_INSIDE))
    attention = queries or (0, "rows") in trained
    first = attention or (0, "after") in trained
    flows = first or any(place[0] == 2 for place in trained)
    of_both = row.shares_norm and (0, "before") in trained
    maps = (sends_back or of_both if row.parallel else flows) or not trained.isdisjoint(
        _places(1, "before", "columns", "rows")
    )
    reads_norm = row.mlp.experts is None or placed.config.model.has_shared_experts  # experts' rows are a copy
    second = (1, "columns") in reading or (maps and "fc1" in parts and reads_norm)
    normed = bool(row.mlp.before) and not row.shares_norm
    added = (flows or (1, "before") in trained or (second and "layernorm" in parts)) if normed else second
    added = added and not row.parallel
    first_added = first or (2, "before") in trained or ((2, "columns") in reading and "layernorm" in parts)
    first_added = first_added and row.cross is not None
    read = {
        (0, "before"): not reading.isdisjoint(_places(0, "columns", "kv_columns"))
        or (second and row.parallel and not normed),
        **dict.fromkeys(_places(0, "columns", "up", "kv_up"), queries),
        (0, "rows"): added or first_added or (bool(row.attention.after) and first),
        (2, "before"): (2, "columns") in reading,
        (2, "rows"): added,
        (0, "after"): added,
        (1, "before"): second,
        (1, "columns"): maps,
    }
    return {place for place, is_read in read.items() if is_read}


_INSIDE = ("columns", "between", "up", *KV)
"""The places before attention's core."""


def inputs_of_heads(model: ModelConfig) -> Iterator[tuple[Fraction, tuple[str, ...], str]]:
    """Yield what each rank of tp reads to make its heads of latent attention: its part of the model's width, the places
    that give it a gradient, and that of the map that reads it, '' if none does."""
    columns, part = model.latents, model.part_of_width
    low_rank = model.decoder.block.attention.latent is not None and model.decoder.block.attention.latent.q is not None
    yield (part(columns.q), ("columns", "between"), "up") if low_rank else (Fraction(1), (), "columns")
    yield part(columns.kv), ("kv_columns", "kv_between"), "kv_up"
    yield part(columns.turned), ("kv_columns",), ""


def _places(branch: int, *of: str) -> set[Place]:
    return {(branch, place) for place in of}


def roles_in(flat: FlatSpec) -> set[Place]:
    """Return what a flat buffer's weights are to their block."""
    return {weight.role[:2] for weight in flat.weights if weight.role is not None}


def _chunks(placed: Placed, share: Share, order: Sequence[str]) -> Mapping[int, tuple[int, tuple[str, ...]]]:
    """Return the pipeline stage's chunks by number, each with the position of its first unit in the model, or of an
    empty one's next."""
    config, found = placed.config, dict[int, tuple[int, tuple[str, ...]]]()
    numbers, blocks = config.chunks.of_stage(share.stage), [n for n, unit in enumerate(order) if is_block(unit)]
    for number, units in zip(numbers, share.chunks, strict=True):
        at = blocks[0] + sum(config.layers_by_chunk(len(blocks))[:number]) if number and blocks else 0
        if units:  # a chunk that begins with the tied table's second use begins at the end
            at = len(order) - 1 if number and units[0] == order[0] else order.index(units[0])
        found[number] = at, units
    return found


def _trained_in(placed: Placed, unit: str, *, reading: bool = False) -> set[Place]:
    """Return the layers of a block with trained weights, including adapters; with `reading` those with weights whose
    gradients read the layer's input."""
    layout, found = placed.layout, set[Place]()
    for name, flat in layout.flats.items():
        if flat.unit == unit and layout.is_trained(name):
            weights = (one for one in flat.weights if one.reads_input or not reading)
            found |= {_as_map(one.role) for one in weights if one.role is not None}
    return found


def _as_map(role: Role) -> Place:
    """Return a weight's place, where a router's is that of its experts' first maps, which read the same input."""
    return role.branch, "columns" if role.place == "router" else role.place


def _in_block(
    model: ModelConfig,
    unit: str,
    trained: set[Place],
    shared: set[Place],
    *,
    sends_back: bool,
    lie: str,
    trains_experts: bool,
) -> tuple[Number, int, Number, int, int, int]:
    """Count in one block: inputs of column-parallel maps that need a gradient, row-parallel maps that backward
    reaches, column-parallel maps that need their input for weights' gradients, queries with a gradient; experts' inputs
    and results that have one. A latent counts for its part of the model's width. `lie`: where experts do
    (`facts.experts_in`). `shared`: the trained layers without experts and their router."""
    row, x, y, z = model.block_of(unit), Fraction(0), 0, Fraction(0)
    x_e = y_e = 0
    queries = sends_back or not trained.isdisjoint(_places(0, "before", *_INSIDE))
    flows = sends_back  # whether the residual stream has a gradient
    for at in BOTH:
        normed_by = 0 if row.shares_norm else at  # side by side they may share a norm
        inner = (sends_back if row.parallel else flows) or (normed_by, "before") in trained
        is_mixed = at == 1 and row.mlp.experts is not None
        is_cut = lie != "apart" or not is_mixed
        x_e += inner and is_mixed
        y_e += is_mixed and (inner or trains_experts)
        if at == 0 and model.is_latent:
            for width, before, place in inputs_of_heads(model):
                x += width * (inner or not trained.isdisjoint(_places(0, *before)))
                z += width * ((0, place) in trained)
        else:
            x += inner and is_cut
            z += (at, "columns") in (shared if is_mixed else trained) and (lie == "beside" or not is_mixed)
        of_cut = shared if is_mixed and lie == "beside" else trained
        y += is_cut and (inner or not of_cut.isdisjoint(_places(at, *_INSIDE, "rows")))
        inner = inner or not trained.isdisjoint(_places(at, *_INSIDE, "rows"))
        flows |= inner or (at, "after") in trained
    return x, y, z, int(queries), x_e, y_e
