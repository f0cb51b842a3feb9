"""What a rank has of a model's state: runs of numbers, each of one state of one weight.

    param      the weight as the optimizer moves it: the fp32 master where there is one
    codes      the bytes of a frozen weight that is stored as codes, and `scales`, if they are apart
    exp_avg    and the optimizer's other states, by PyTorch's names
    grad       a gradient that waits for a delayed update
    residual   and what else an exchange of gradients keeps on each rank

A run says where it lies in the whole: the weight's cuts over the mesh (`placement/split.py`), and which numbers of the
piece that they leave. So no reader needs the layout of the run that wrote it. Copies are written once, by shares:
each of C ranks with the same numbers writes 1/C of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zerosim.device.device import Buffer
from zerosim.optim.states import StateArray, by_weight
from zerosim.parallel.base import Strategy
from zerosim.parallel.stage import Stage
from zerosim.placement.layout import Layout
from zerosim.placement.mesh import Mesh
from zerosim.placement.partition import Slice
from zerosim.placement.rows import Row
from zerosim.placement.spec import FlatSpec, Overlap, WeightSpec
from zerosim.placement.split import Split
from zerosim.state.manifest import count
from zerosim.tensor.flat import Flat, in_turn
from zerosim.tensor.stored import beside

PARAM, CODES, SCALES, GRAD, BIAS = "param", "codes", "scales", "grad", "bias"
FOLLOWS = ("elements", "blocks", "rows", "columns", "bytes", "rank", "packed")
CHECKPOINT = "checkpoint"
"""The purpose of a save's copies."""
Cuts = tuple[tuple[Split, int], ...]
"""A weight's cuts, and the number of the piece that is meant of each."""


class Run(NamedTuple):
    """Numbers [start, stop) of one state of a weight's piece.

    tensor    the weight's name, with what distinguishes its piece in one rank's file
    shape     of the whole weight; `cuts` leave the piece of it
    follows   what the state has a number for (`StateArray.follows`); 'bytes' of codes; 'rank': of each rank's own
    rank      of numbers that are a rank's own, that rank
    """

    tensor: str
    weight: str
    state: str
    shape: tuple[int, ...]
    cuts: Cuts
    follows: str
    start: int
    stop: int
    rank: int | None = None

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def name(self) -> str:
        """Its name in a file; with where it begins, if that is not the piece's beginning."""
        return f"{self.tensor}.{self.state}" + (f"@{self.start}" if self.start else "")


class Source(NamedTuple):
    """A run, the buffer that holds it, and the flat whose turn it is."""

    run: Run
    buffer: Buffer
    flat: str = ""


def cuts_of(weight: WeightSpec, mesh: Mesh, rank: int) -> Cuts:
    """Return a rank's piece of a weight; copies of a piece have equal cuts."""
    return tuple((cut.split, cut.split.piece(cut.member, cut.members)) for cut in weight.cuts(mesh, rank))


class Places(NamedTuple):
    """Where a state's numbers are: the weight's overlap with a slice, the state, its numbers, and their place in the
    slice's array."""

    mine: Overlap
    state: str
    follows: str
    start: int
    stop: int
    at: slice


def places(spec: FlatSpec, arrays: Sequence[StateArray], part: Slice) -> Iterator[Places]:
    """Yield the weights in a slice of a flat buffer, and the numbers of each in the parameters and in these arrays."""
    follows = {array.name: array for array in arrays}
    for mine, found in by_weight(arrays, spec, part):
        coded = mine.weight.format is not None
        here = slice(mine.at, mine.at + mine.numel)
        yield Places(mine, CODES if coded else PARAM, "bytes" if coded else "elements", mine.start, mine.stop, here)
        for name, at in found.items():
            start, stop = follows[name].numbers(mine)
            yield Places(mine, name, follows[name].follows, start, stop, at)


def run_of(place: Places, mesh: Mesh, rank: int) -> Run:
    """Return a rank's run at a place."""
    weight = place.mine.weight
    cuts = cuts_of(weight, mesh, rank)
    return Run(
        weight.own_name, weight.name, place.state, weight.whole_shape, cuts, place.follows, place.start, place.stop
    )


def arrays_of(strategy: Strategy, flat: Flat, part: Slice | None = None) -> list[StateArray]:
    """Return the optimizer's states of a slice, the local one by default; none of a frozen buffer."""
    return strategy.updater.arrays(flat, part) if strategy.layout.is_trained(flat.name) else []


def holders(mesh: Mesh, ranks: Sequence[int], row: Row, weight: WeightSpec) -> Mapping[int, tuple[int, int]]:
    """Return for each rank of a pipeline stage its number among those that hold the same numbers of a weight, and how
    many they are."""
    together = defaultdict[Hashable, list[int]](list)
    for rank in ranks:
        together[() if row.is_whole else mesh.index(rank, *row.axes), cuts_of(weight, mesh, rank)].append(rank)
    return {rank: (at, len(same)) for same in together.values() for at, rank in enumerate(same)}


class Copies:
    """Which ranks hold the same numbers of a weight, as a rank's number among them and how many they are."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self._found: dict[object, tuple[int, int]] = {}

    def of(self, flat: FlatSpec, weight: WeightSpec) -> tuple[int, int]:
        """Return (number, count) for a weight of a flat buffer that the rank holds; a count of 0: an earlier pipeline
        stage writes it."""
        layout, mesh = self.layout, self.layout.mesh
        stage, rows = mesh.index(self.rank, "pp"), layout.rows(flat.name)
        if not layout.is_counted(stage, flat.name):
            return 0, 0
        row = rows["optim" if "optim" in rows else "param"]
        key = stage, row.is_whole, row.axes, weight.splits
        if key not in self._found:
            ranks = [rank for rank in range(mesh.world_size) if mesh.index(rank, "pp") == stage]
            self._found[key] = holders(mesh, ranks, row, weight)[self.rank]
        return self._found[key]


def share(numel: int, number: int, count: int) -> tuple[int, int]:
    """Return the numbers [start, stop) of `numel` that one of `count` holders of copies writes: the first ones write
    one number more where they do not divide evenly."""
    each, more = divmod(numel, count) if count else (0, 0)
    start = number * each + min(number, more)
    return start, start + each + (number < more)


def written(strategy: Strategy, rank: int) -> Iterator[Source]:
    """Yield what this rank writes of the whole state: its shards, and its share of what others hold too."""
    copies, mesh = Copies(strategy.layout, rank), strategy.layout.mesh
    for flat in in_turn(strategy.flats):
        arrays = [array for array in arrays_of(strategy, flat) if array.name in flat.states]
        waiting = strategy.shards.step.waiting(flat)
        buffers = {**flat.states, PARAM: flat.weights(), CODES: flat.weights()}
        for place in places(flat.spec, arrays, flat.own):
            yield from _shared(run_of(place, mesh, rank), buffers[place.state][place.at], flat.spec, place.mine, copies)
            if waiting is not None and place.state == PARAM:
                late = run_of(place._replace(state=GRAD), mesh, rank)
                yield from _shared(late, waiting[place.at], flat.spec, place.mine, copies)
        own = strategy.layout.own(rank, flat.name)
        if own.size and not own.start:  # the first slice's rank, or the owner, writes what all have
            for mine, (run, buffer, _) in scales_of(flat, mesh, rank):
                yield from _shared(run, buffer, flat.spec, mine, copies)


def _shared(run: Run, buffer: Buffer, flat: FlatSpec, mine: Overlap, copies: Copies) -> Iterator[Source]:
    number, count = copies.of(flat, mine.weight)
    if run.follows in ("rows", "columns") and mine.start:
        return  # every slice has them: the first one's rank writes
    start, stop = share(run.numel, number, count)
    if start < stop:
        part = run._replace(start=run.start + start, stop=run.start + stop)
        yield Source(part, buffer[start:stop], flat.name)


def scales_of(flat: Flat, mesh: Mesh, rank: int) -> Iterator[tuple[Overlap, Source]]:
    """Yield the scales that are whole on every rank, weight by weight."""
    if flat.scales is None:
        return
    for index, weight in enumerate(flat.spec.weights):
        at = beside(flat.spec, index)
        mine = Overlap(index, weight, 0, weight.numel, 0)
        yield (
            mine,
            Source(run_of(Places(mine, SCALES, "bytes", 0, at.stop - at.start, at), mesh, rank), flat.scales[at]),
        )


def own_numbers(strategy: Stage, rank: int) -> Iterator[Source]:
    """Yield what a rank's exchange keeps: of each rank's own, or a slice of one vector of all."""
    mesh, exchange = strategy.layout.mesh, strategy.exchange
    flats = {flat.name: flat for flat in strategy.flats}
    for (state, name), kept in exchange.kept.items():
        spec = flats[name].spec
        if not kept.numel:
            continue
        if exchange.keeps[state] == "packed":
            yield Source(Run(name, name, state, (kept.numel,), (), "packed", 0, kept.numel, rank), kept)
            continue
        is_slice = exchange.keeps[state] == "slice"
        start = exchange.group_of(flats[name]).rank * kept.numel if is_slice else 0
        for mine in spec.within(Slice(start, start + kept.numel, spec.numel)):
            place = Places(mine, state, "elements", mine.start, mine.stop, slice(mine.at, mine.at + mine.numel))
            run = run_of(place, mesh, rank)
            if not is_slice:
                run = run._replace(rank=rank, follows="rank")
            yield Source(run, kept[place.at])


def to_json(run: Run) -> dict[str, Any]:
    """Return a run as JSON holds it."""
    values = run._asdict()
    values["cuts"] = [
        {
            **{name: getattr(split, name) for name in ("shape", "dim", "pieces", "parts", "padding", "axis")},
            **({"lengths": split.lengths} if split.lengths else {}),
            **({"around": split.around} if split.around != (0, 0) else {}),
            "piece": piece,
        }
        for split, piece in run.cuts
    ]
    return values


def from_json(values: Any) -> Run:
    """Return a run from its JSON. Raises: KeyError, TypeError, ValueError, IndexError or ZeroDivisionError for other
    JSON, and for cuts that do not fit the weight, or one another."""
    shape, rank = _counts(values["shape"]), values["rank"]
    run = Run(
        tensor=_text(values["tensor"]),
        weight=_text(values["weight"]),
        state=_text(values["state"]),
        shape=shape,
        cuts=tuple(_cut(cut) for cut in values["cuts"]),
        follows=_text(values["follows"]),
        start=count(values["start"]),
        stop=count(values["stop"]),
        rank=None if rank is None else count(rank),
    )
    for split, piece in run.cuts:
        if split.shape != shape or not 0 <= piece < split.pieces:
            raise ValueError(f"piece {piece} of {split.pieces} of shape {split.shape} is none of {shape}")
        shape = split.local_shape
    if run.follows not in FOLLOWS or run.start > run.stop:
        raise ValueError(f"{run.follows} {run.start} to {run.stop}")
    if run.follows in ("elements", "rank") and run.stop > math.prod(shape):
        raise ValueError(f"{run.stop} numbers of shape {shape}")
    return run


def _cut(cut: Any) -> tuple[Split, int]:
    before, after = _counts(cut.get("around", [0, 0]))
    shape, dim, pieces = _counts(cut["shape"]), count(cut["dim"]), count(cut["pieces"], least=1)
    parts, padding, lengths = count(cut["parts"], least=1), count(cut["padding"]), _counts(cut.get("lengths", []))
    if dim >= len(shape):
        raise ValueError(f"dim {dim} of shape {shape}")
    return Split(shape, dim, pieces, parts, padding, _text(cut["axis"]), lengths, (before, after)), count(cut["piece"])


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{str(values)[:40]!r} is no list")
    return tuple(count(value) for value in values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return value
