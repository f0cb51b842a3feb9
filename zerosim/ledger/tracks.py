"""A rank's step in time, as the clock leaves it: its seconds by cause, and each piece of a stream's work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from zerosim.device.events import Scope


class Span(NamedTuple):
    """One piece of a stream's work from `start` to `stop`, in seconds from the beginning of the step.

    `waits_for` is the stream that compute waits for, if `name` is 'wait'. `number` is a call's number in its stream.
    `bubble` is the interval of a wait in which another rank has not arrived yet.
    """

    stream: str
    name: str
    start: float
    stop: float
    scope: Scope
    waits_for: str = ""
    number: int = -1
    bubble: tuple[float, float] = (0.0, 0.0)


@dataclass(slots=True)
class Track:
    """One rank's step in time.

    exposed  seconds that compute waited for a collective's own time, by mesh axis
    bubble   seconds that it waited for another rank to arrive
    host     seconds that it waited for its host to launch the next kernel
    copies   seconds that it waited for copies between the rank's own memories
    cpu      seconds that it waited for kernels on the host's CPU
    slowed   seconds that kernels took longer because collectives were in flight
    """

    rank: int
    end: float = 0.0
    compute: float = 0.0
    copies: float = 0.0
    cpu: float = 0.0
    bubble: float = 0.0
    host: float = 0.0
    slowed: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    kernels: int = 0
    flops: int = 0
    model_flops: int = 0
    spans: list[Span] = field(default_factory=list)
    live: list[tuple[float, int]] = field(default_factory=list)  # seconds, and the bytes live from then on
