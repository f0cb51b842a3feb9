"""The part of the model on each rank at one moment, read from its record and its layout: numbers only.

A strip is one state of the whole model, from its first buffer to its last. A piece is a rank's part of one buffer.
Bytes are live ones; a piece's place in its buffer is the layout's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from zerosim.config import RunConfig
from zerosim.device.device import Phase
from zerosim.device.events import Alloc, Event, Mark
from zerosim.errors import InputError, wrong
from zerosim.ledger.memory import MemoryLedger
from zerosim.placement.mesh import MODEL
from zerosim.train.result import RunResult

STRIPS = {"param": "parameters", "grad": "gradients", "optim": "optimizer states"}
"""The states of a model, in the paper's order, in words."""
_WHOLE = {"unsharded_param": "param", "prefetched_param": "param", "unsharded_grad": "grad"}
MOST_SHOWN = 4
_KINDS = (*STRIPS, *_WHOLE)


class Piece(NamedTuple):
    """Elements `start` to `stop` of the whole model, held as this kind of memory."""

    kind: str
    start: int
    stop: int


class Holding(NamedTuple):
    """One rank at one moment: its pieces by strip, its live bytes of each strip, and the active unit."""

    rank: int
    pieces: dict[str, tuple[Piece, ...]]
    nbytes: dict[str, int]
    unit: str

    def to_dict(self) -> dict[str, Any]:
        pieces = {strip: [list(piece) for piece in held] for strip, held in self.pieces.items()}
        return {"rank": self.rank, "bytes": self.nbytes, "pieces": pieces, "unit": self.unit}


def check_one_axis(config: RunConfig) -> None:
    """Check the mesh. Raises: InputError for one in which ranks hold parts of a tensor or of the layers."""
    for axis in (*reversed(MODEL), "dp_replicate"):
        if (size := config.mesh.axes.size(axis)) > 1:
            raise wrong(axis, f" {size}: the picture is of data-parallel ranks alone; leave it out")


def shown_ranks(ranks: int) -> list[int]:
    """Return the drawn ranks: all of a few, else the first two and the last."""
    return list(range(ranks)) if ranks <= MOST_SHOWN else [0, 1, ranks - 1]


def bounds(result: RunResult) -> dict[str, tuple[int, int]]:
    """Return each buffer's place in the whole model, in elements."""
    found, start = {}, 0
    for name, flat in result.layout.flats.items():
        found[name] = start, start + flat.numel
        start += flat.numel
    return found


def holdings(result: RunResult, step: int = 0) -> dict[str, list[Holding]]:
    """Return the holdings of the drawn ranks at each of the `moments` of their records."""
    found: dict[str, list[Holding]] = {}
    for rank in shown_ranks(result.config.mesh.ranks):
        for moment, index in moments(result.events[rank], step).items():
            found.setdefault(moment, []).append(_holding(result, rank, index))
    return found


def _holding(result: RunResult, rank: int, index: int) -> Holding:
    ledger = MemoryLedger()
    events = result.events[rank][: index + 1]
    ledger.read(events)
    places, held, nbytes = bounds(result), {strip: list[Piece]() for strip in STRIPS}, dict.fromkeys(STRIPS, 0)
    for (unit, kind), live in ledger.now().by_unit.items():
        if kind not in _KINDS or not live:
            continue
        strip = _WHOLE.get(kind, kind)
        nbytes[strip] += live
        if unit not in places:  # a head that is tied to a table: the table's place
            unit = next(iter(places))
        start, stop = places[unit]
        if kind in STRIPS:
            part = result.layout.part(rank, unit, kind)
            start, stop = start + part.start, min(start + part.stop, stop)
        if start < stop:
            held[strip].append(Piece(kind, start, stop))
    return Holding(rank, {strip: tuple(pieces) for strip, pieces in held.items()}, nbytes, events[-1].scope.unit)


def moments(events: Sequence[Event], step: int = 0) -> dict[str, int]:
    """Return three moments of a step, by name: the number of the event before each.

    before and after: the marks around the backward. during: while the middle one of the units is in backward, the first
    moment at which the most bytes of model states are live. Raises: InputError if nothing is trained, so that there is
    no backward.
    """
    of_step = [(at, event) for at, event in enumerate(events) if event.scope.step == step]
    marks = {event.name: at for at, event in of_step if isinstance(event, Mark)}
    inside = [at for at, event in of_step if event.scope.phase == Phase.BACKWARD]
    units = list(dict.fromkeys(events[at].scope.unit for at in inside if _is_of_states(events[at])))
    if not units or "end_of_forward" not in marks:
        raise InputError("there is no backward to show: nothing of the model is trained")
    middle = units[(len(units) - 1) // 2]
    ledger, most, during = MemoryLedger(), -1, 0
    last = max(at for at in inside if events[at].scope.unit == middle)
    for at, event in enumerate(events[: last + 1]):
        ledger.read([event])
        if isinstance(event, Alloc) and event.scope[:3] == (step, Phase.BACKWARD, middle):
            live = sum(nbytes for kind, nbytes in ledger.now().by_kind.items() if kind in _KINDS)
            most, during = max((most, during), (live, at), key=lambda pair: (pair[0], -pair[1]))
    return {"before": marks["end_of_forward"], "during": during, "after": marks["end_of_backward"]}


def _is_of_states(event: Event) -> bool:
    return isinstance(event, Alloc) and event.kind in _KINDS and bool(event.scope.unit)
