"""Moments at which notebooks 04 to 06 stop a world under `zerosim.debug`, and their readings: gradients and
collectives.

The pictures of these are in `ranks.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from zerosim.device.events import Event, Launch, Wait
from zerosim.errors import InputError
from zerosim.lessons.tables import table
from zerosim.report.look import Adaptive, Stack
from zerosim.stepper import DebugWorld, Match, PendingCollective
from zerosim.tensor.flat import Flat


# -- going on ----------------------------------------------------------------------------------------
def line_up(world: DebugWorld, what: str, *, unit: str | None = None, phase: str | None = None) -> None:
    """Go on until every rank's next event matches.

    Raises: InputError for a condition that no event can meet, and when a rank's run ends first.
    """
    wanted = Match(what, unit=unit, phase=phase).checked(world.config.mesh.ranks, world.units, world.steps)
    for rank in range(world.config.mesh.ranks):
        world.next(rank=rank)  # the event before which it stands now is not its next
        while (coming := world.ranks[rank].next_event) is None or not wanted.matches(rank, coming.event):
            world.next(rank=rank)


def meet(world: DebugWorld, op: str, *, unit: str | None = None, phase: str | None = None) -> PendingCollective:
    """Go on to the next collective that matches, until all ranks but the last have joined it; the last stands before
    it.

    Returns it. Raises: InputError as `world.until` does, and in a world of one rank, where no rank waits.
    """
    if world.config.mesh.ranks == 1:
        raise InputError("a world of 1 rank never waits for another: use ranks=2 or more")
    line_up(world, op, unit=unit, phase=phase)
    for rank in range(world.config.mesh.ranks - 1):
        while world.ranks[rank].next_event is not None:
            world.next(rank=rank)
    return world.pending_collectives[0]


def leave(world: DebugWorld) -> None:
    """Leave the collective where `world` stands since `meet`: every rank has its result."""
    last = world.config.mesh.ranks - 1
    for rank in (last, *range(last)):
        while not isinstance(world.next(rank=rank).event, Wait):
            pass


# -- looking -----------------------------------------------------------------------------------------
def gradient(world: DebugWorld, rank: int, unit: str) -> Any:
    """Return the current gradient of a unit's buffer on a rank, in float32, without padding.

    It is all of it if it is stored whole or being computed, else the local slice.

    Raises: InputError for an unknown unit, and if the rank holds no gradient of it.
    """
    flats: dict[str, Flat] = {flat.name: flat for flat in world.ranks[rank].model.flats}
    if unit not in flats:
        raise InputError(f"unknown buffer {unit!r}: expected one of {', '.join(flats)}")
    flat = flats[unit]
    whole = flat.grad_whole if flat.grad_whole is not None else flat.collector.grad
    held = flat.grad_shard if whole is None else whole
    if held is None:
        raise InputError(f"rank {rank} holds no gradient of {unit} now: the rank is {world.ranks[rank].status}")
    start, stop = (0, flat.numel) if whole is not None else (flat.own.start, min(flat.own.stop, flat.numel))
    values = flat.device.backend.to_host(held.array)[: max(0, stop - start)]
    return values.astype(np.float32)


def gradients(world: DebugWorld, unit: str) -> list[Any]:
    """Return `gradient` of every rank."""
    return [gradient(world, rank, unit) for rank in range(world.config.mesh.ranks)]


class Joined(NamedTuple):
    """A collective that a rank joined."""

    phase: str
    unit: str
    op: str
    payload_bytes: int
    sent_bytes: int


def joined(events: Sequence[Event], step: int, purpose: str = "states") -> list[Joined]:
    """Return a rank's collectives in a step, in order: those of the model states or of `purpose`."""
    return [
        Joined(event.scope.phase, event.scope.unit, event.op, event.payload_bytes, event.wire_bytes)
        for event in events
        if isinstance(event, Launch) and event.scope.step == step and event.purpose == purpose
    ]


def joined_table(events: Sequence[Event], step: int, title: str) -> Stack | Adaptive:
    """Return `joined` as a table, a line each, and their sum."""
    rows = joined(events, step)
    total = ("in all", "", "", sum(row.payload_bytes for row in rows), sum(row.sent_bytes for row in rows))
    return table(["phase", "unit", "operation", "payload, B", "sent, B"], [*rows, total], title=title)
