"""A world stepped from collective to collective, and what it shows there: batches, gradients, bytes.

Owns where notebooks 04 to 06 stop a world under `zerosim.debug`, and how they look at it. What ranks
send is read in `senders.py`. Counts nothing by formula: bytes are the recorder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.config import RunConfig
from zerosim.device.events import Alloc, Event, Retag, Wait
from zerosim.dtypes import dtype
from zerosim.errors import InputError
from zerosim.ledger.memory import MemoryLedger, Snapshot
from zerosim.report.plots.bars import Bar, draw_bars, key_of, too_thin
from zerosim.report.plots.page import Picture, frame, open_page
from zerosim.report.plots.style import KIND_PAINTS
from zerosim.stepper import DebugWorld, Match, UnderWay
from zerosim.tensor.flat import Flat
from zerosim.train import data


def rank_batches(config: RunConfig, step: int = 0) -> list[list[Any]]:
    """The token ids that each rank trains on in a step: [rank][micro-batch], each (rows, seq + 1).

    Raises: InputError where the ids come from a file of tokens.
    """
    if config.data.tokens is not None:
        raise InputError("rank_batches draws from a text: the ids of a `tokens` file can be read from the file")
    text = data.read_text(config.data.file, config.model.seq, config.model.vocab)
    batch = data.sample_batch(text, config.data.seed, step, config.global_batch, config.model.seq)
    return [
        data.micro_batches(batch, rank, config.mesh.ranks, config.data.accumulate) for rank in range(config.mesh.ranks)
    ]


def line_up(world: DebugWorld, what: str, *, unit: str | None = None, phase: str | None = None) -> None:
    """Go on until every rank stands before its next event like that.

    Raises: InputError for what can never come, and when a rank's run ends first.
    """
    wanted = Match(what, unit=unit, phase=phase)
    wanted.check(world.config.mesh.ranks, world.units, world.steps)
    for rank in range(world.config.mesh.ranks):
        world.next(rank=rank)  # the one that it stands before now is not its next
        while (coming := world.ranks[rank].coming) is None or not wanted.matches(rank, coming.event):
            world.next(rank=rank)


def meet(world: DebugWorld, op: str, *, unit: str | None = None, phase: str | None = None) -> UnderWay:
    """Go on to the next collective like that, until all ranks but the last have joined it; the last stands before it.

    Returns it. Raises: InputError as `world.until` does, and in a world of one rank, where nobody waits.
    """
    if world.config.mesh.ranks == 1:
        raise InputError("a world of 1 rank has nobody to meet: use ranks=2 or more")
    line_up(world, op, unit=unit, phase=phase)
    for rank in range(world.config.mesh.ranks - 1):
        while world.ranks[rank].coming is not None:
            world.next(rank=rank)
    return world.inbox[0]


def leave(world: DebugWorld) -> None:
    """Out of the collective where `world` stands since `meet`: every rank has its result."""
    last = world.config.mesh.ranks - 1
    for rank in (last, *range(last)):
        while not isinstance(world.next(rank=rank).event, Wait):
            pass


def as_text(ids: Sequence[int], most: int = 40) -> str:
    """The first bytes of a row of ids, as text on one line; what cannot be printed is a dot."""
    letters = bytes(int(token) for token in ids[:most]).decode("ascii", "replace")
    return "".join(letter if letter.isprintable() and letter != "\ufffd" else "." for letter in letters)


@dataclass(frozen=True, slots=True)
class HeldGradient:
    """What a rank holds of a unit's gradient: elements [start, stop) of `numel`; `values` are float32."""

    unit: str
    rank: int
    start: int
    stop: int
    numel: int
    values: Any

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop == self.numel


def gradient(world: DebugWorld, rank: int, unit: str) -> HeldGradient:
    """The gradient of a unit's buffer as a rank holds it now, padding left out.

    All of it where it is kept whole or being made, else the own slice.

    Raises: InputError for an unknown unit, and where the rank holds nothing of it.
    """
    flat = _flat(world, rank, unit)
    to_host = flat.device.backend.to_host
    whole = flat.grad_whole if flat.grad_whole is not None else flat.grad
    if whole is not None:
        values = to_host(whole.array)[: flat.numel]
        return HeldGradient(unit, rank, 0, flat.numel, flat.numel, values.astype(np.float32))
    if flat.grad_shard is None:
        raise InputError(f"rank {rank} holds no gradient of {unit} now: it stands {world.ranks[rank].stands}")
    start, stop = min(flat.own.start, flat.numel), min(flat.own.stop, flat.numel)
    values = to_host(flat.grad_shard.array)[: stop - start]
    return HeldGradient(unit, rank, start, stop, flat.numel, values.astype(np.float32))


def gradients(world: DebugWorld, unit: str) -> list[Any]:
    """`gradient(...).values` of every rank."""
    return [gradient(world, rank, unit).values for rank in range(world.config.mesh.ranks)]


def mean_of_ranks(whole: Sequence[Any], format: str = "bf16") -> Any:
    """The ranks' whole gradients added in rank order in float32, divided by their number, rounded once to `format`.

    That is what a `direct` reduction promises; float32 values. Shapes: each (n,), as the result.

    Raises: InputError for no gradients.
    """
    if not whole:
        raise InputError("no gradients: there is no mean of them; give at least one rank's")
    total = whole[0].astype(np.float32)
    for values in whole[1:]:
        total = total + values
    backend = NumpyBackend()
    rounded = backend.empty(total.shape, dtype(format))
    backend.from_host(total / np.float32(len(whole)), rounded)
    return backend.to_host(rounded).astype(np.float32)


def _flat(world: DebugWorld, rank: int, unit: str) -> Flat:
    flats: dict[str, Flat] = {flat.name: flat for flat in world.ranks[rank].model.flats}
    if unit not in flats:
        raise InputError(f"no buffer of the name {unit!r}: expected one of {', '.join(flats)}")
    return flats[unit]


def most_live(events: Sequence[Event], kind: str) -> int:
    """The most bytes of a kind that were live at one time, by a rank's record."""
    ledger, most = MemoryLedger(), 0
    for event in events:
        ledger.read([event])
        if isinstance(event, Alloc | Retag):
            most = max(most, ledger.now().by_kind.get(kind, 0))
    return most


def ranks_figure(snapshots: Sequence[Snapshot], title: str, subtitle: str = "") -> Picture:
    """One bar of live bytes per rank, stacked by kind. Raises: InputError for no ranks."""
    if not snapshots:
        raise InputError("no ranks: there is nothing to draw; give at least one snapshot")
    bars = [Bar(f"rank {rank}", dict(snapshot.by_kind), rank, True) for rank, snapshot in enumerate(snapshots)]
    page = open_page((8.0, max(3.0, 1.7 + 0.36 * len(bars))), "light")
    frame(page, title, subtitle, key_of(page, bars, KIND_PAINTS), too_thin(bars))
    draw_bars(page, bars, KIND_PAINTS)
    figure = page.figure
    assert isinstance(figure, Picture)  # by open_page
    return figure
