"""Collectives and messages on one rank of the clock (`rank_clock.py`), and what equal ones share."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Any, NamedTuple

from zerosim.device.events import Launch
from zerosim.placement.mesh import EXPERTS, FINEST, STATES, Mesh
from zerosim.verbs import MESSAGES


class Copied(NamedTuple):
    """A launched copy, or an event in the CPU's work. Its times are known at once."""

    stream: str
    start: float
    stop: float


class Line:
    """The calls of one rank that are numbered together, by their numbers: those in one stream between members at the
    same positions. `queue` has the stream's calls whose times are still unknown."""

    __slots__ = ("calls", "queue", "stream")

    def __init__(self, stream: str, queue: deque[Call]) -> None:
        self.stream, self.queue, self.calls = stream, queue, dict[int, Call]()


class Way:
    """What equal calls of one rank share.

    line        where they are numbered
    axis        of their seconds
    launch      the host's seconds to launch one
    is_message  whether it needs almost no multiprocessors
    sides       the ranks that represent the members, and the line of each one's own call (None: not found yet)
    seconds     of one, once all have arrived (None: not found yet)
    """

    __slots__ = ("axis", "is_message", "launch", "line", "seconds", "sides")

    def __init__(self, line: Line, event: Launch, launch: float) -> None:
        self.line, self.axis, self.launch, self.is_message = line, axis_of(event), launch, event.op in MESSAGES
        self.sides: list[tuple[Any, Line]] | None = None
        self.seconds: float | None = None


class Call:
    """One collective on one rank: its earliest start there and, once known, its start and end."""

    __slots__ = ("event", "launched", "number", "read", "ready", "start", "stop", "way")

    def __init__(self, way: Way, number: int, event: Launch, launched: float) -> None:
        self.way, self.number, self.event, self.launched = way, number, event, launched
        self.ready = -1.0  # after the earlier work of its stream
        self.start = self.stop = -1.0
        self.read = 0  # members that have placed theirs beside it


def stream_of(event: Launch, mesh: Mesh) -> str:
    """Return a call's stream. Messages are numbered by ordered pair and direction, which is forward's or backward's."""
    if event.op not in MESSAGES:
        return axis_of(event)
    ends = [mesh.index(rank, event.axis) for rank in event.group]
    return f"{event.axis} {ends[0]} to {ends[1]}, {event.scope.phase}"


def places_of(event: Launch, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Return the members' positions along the axes in which they differ; identical groups have equal positions."""
    folded = not {*EXPERTS}.isdisjoint(event.axis.split("+"))
    return _places(mesh, event.group, EXPERTS if folded else FINEST[: -len(EXPERTS)])


def axis_of(event: Launch) -> str:
    """Return the name of the event's axis. Frameworks have a group of their own for model states, also where these are
    cut over cp alone."""
    return "+".join(STATES) if event.axis == "cp" and event.purpose != "activations" else event.axis


@lru_cache(maxsize=4096)
def _places(mesh: Mesh, group: tuple[int, ...], axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    columns = [[mesh.index(rank, axis) for rank in group] for axis in axes]
    return tuple(tuple(column) for column in columns if len(set(column)) > 1)
