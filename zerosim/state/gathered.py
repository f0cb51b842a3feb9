"""A gathered save: all ranks join the all-gathers of every state, and the first of each group has the whole.

Each state of each flat buffer is gathered alone, copied to the host by the first rank, and freed. At stage 3 rank 0
receives all Psi numbers of each state, and its host then has all of them. Slices with unequally many numbers (8-bit
states, Adafactor's) are padded to the longest. With owners the owner broadcasts.

Source: PyTorch 2.13, the full state dicts of FSDP (rank0_only, offload_to_cpu).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zerosim.device.copies import copy_to_host
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType
from zerosim.parallel.base import Strategy
from zerosim.placement.layout import Layout
from zerosim.placement.partition import Slice
from zerosim.placement.spec import WeightSpec
from zerosim.state.runs import CHECKPOINT, CODES, GRAD, PARAM, SCALES, Source, arrays_of, places, run_of, scales_of
from zerosim.tensor.flat import Flat, in_turn


def gathered(strategy: Strategy) -> Iterator[Source]:
    """Yield whole states of this rank's part of the model, on the host of the first rank of each group; on others
    nothing, though they join the same collectives."""
    for flat in in_turn(strategy.flats):
        with strategy.device.scope(unit=flat.spec.module):
            for name, dtype, own in _states(strategy, flat):
                yield from _of_state(strategy, flat, name, dtype, own)
            for mine, source in scales_of(flat, strategy.layout.mesh, strategy.device.rank):
                if leads(strategy.layout, strategy.device.rank, flat.name) and _counts(strategy, flat, mine.weight):
                    yield source


def _states(strategy: Strategy, flat: Flat) -> Iterator[tuple[str, DType, Buffer | None]]:
    """Yield a flat's states by name, with this rank's slice; None: it has none, though others have."""
    target = flat.weights()
    yield PARAM if flat.format is None else CODES, target.dtype, target
    for array in arrays_of(strategy, flat, Slice(0, flat.numel, flat.numel)):
        yield array.name, array.dtype, flat.states.get(array.name)
    if (waiting := strategy.shards.step.waiting(flat)) is not None:
        yield GRAD, waiting.dtype, waiting


def _of_state(strategy: Strategy, flat: Flat, name: str, dtype: DType, own: Buffer | None) -> Iterator[Source]:
    layout, rank = strategy.layout, strategy.device.rank
    state = "optim" if layout.is_trained(flat.name) else "param"
    is_whole, stage = layout.rows(flat.name)[state].is_whole, layout.mesh.index(rank, "pp")
    parts = [flat.own] if is_whole else layout.parts(stage, flat.name, state)
    sizes = [_numel(strategy, flat, name, part) for part in parts]
    whole = own if is_whole else _gathered(strategy, flat, dtype, own, sizes)
    if whole is None or not leads(layout, rank, flat.name):
        return
    host, each = copy_to_host(whole, Kind.TEMP, CHECKPOINT), 0 if layout.owner(flat.name) is not None else max(sizes)
    del whole
    for number, part in enumerate(parts):
        for place in places(flat.spec, arrays_of(strategy, flat, part), part):
            is_of_state = place.state == (PARAM if name == GRAD else name)
            is_again = place.follows in ("rows", "columns") and place.mine.start > 0
            if is_of_state and not is_again and _counts(strategy, flat, place.mine.weight):
                run = run_of(place._replace(state=name), layout.mesh, rank)
                yield Source(run, host[number * each + place.at.start : number * each + place.at.stop], flat.name)


def _numel(strategy: Strategy, flat: Flat, name: str, part: Slice) -> int:
    """Return how many numbers of a state a slice has, padding included."""
    arrays = {array.name: array.numel for array in arrays_of(strategy, flat, part)}
    return part.size if name in (PARAM, CODES, GRAD, SCALES) else arrays.get(name, 0)


def _gathered(strategy: Strategy, flat: Flat, dtype: DType, own: Buffer | None, sizes: Sequence[int]) -> Buffer | None:
    """Return all members' slices of a state in a new buffer, each as long as the longest; with owners the owner's."""
    device, longest = strategy.device, max(sizes)
    group, owner = strategy.groups(*flat.held.axes), strategy.layout.owner(flat.name)
    if not longest:
        return None
    if own is None or own.numel < longest:
        padded = device.alloc((longest,), dtype, Kind.COMM)
        if own is not None and own.numel:
            device.kernel(0, device.backend.copy, own.array, padded[: own.numel].array)
        own = padded
    if group.size == 1:
        return own
    return group.all_gather(own, kind=Kind.COMM) if owner is None else group.broadcast(own, owner)


def leads(layout: Layout, rank: int, name: str) -> bool:
    """Return whether a rank is the first of those that hold a flat buffer's slices: it writes."""
    mesh, rows = layout.mesh, layout.rows(name)
    axes = rows["optim" if layout.is_trained(name) else "param"].axes
    return all(mesh.index(rank, axis) == 0 for axis in ("dp_replicate", *axes))


def _counts(strategy: Strategy, flat: Flat, weight: WeightSpec) -> bool:
    """Return whether this rank's piece of a weight is the first of equal ones."""
    layout, rank = strategy.layout, strategy.device.rank
    stage = layout.mesh.index(rank, "pp")
    return layout.is_counted(stage, flat.name) and weight.counts(layout.mesh, rank, flat.spec.cut_axes)
