"""Time contestants in turn, on a machine that other programs use too.

A contestant is anything with a `step`. In each round every contestant takes one turn. The order is reversed
from one round to the next (A B C, C B A, ...). So a slow phase of the machine hits all contestants alike, and none of
them always follows the same neighbour.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Protocol

Progress = Callable[[str], None]
"""A callable that prints one line of progress."""


class Timing(NamedTuple):
    """Seconds of one step: between two events in a GPU's stream, and on the host's clock around them.

    Without a GPU both are the host's.
    """

    device_s: float
    host_s: float


class Timer(Protocol):
    """A clock other than the host's: a GPU stream's events."""

    def start(self) -> None: ...

    def stop(self) -> float:
        """Wait for the stream's work to end, and return the seconds since `start`."""
        ...


def timed(work: Callable[[], object], timer: Timer | None = None) -> Timing:
    """Do the work once and time it: by `timer` and the host's clock, or by the host's clock alone."""
    started = time.perf_counter()
    if timer is None:
        work()
        host_s = time.perf_counter() - started
        return Timing(host_s, host_s)
    timer.start()
    work()
    device_s = timer.stop()
    return Timing(device_s, time.perf_counter() - started)


class Contestant(ABC):
    """One of the things compared."""

    @abstractmethod
    def step(self) -> Timing:
        """Do the work once, from an idle device to an idle device."""

    def release(self) -> None:  # noqa: B027 (most contestants hold nothing)
        """Free cached GPU memory, so that the next contestant has room."""

    @property
    def flops(self) -> Mapping[str, int]:
        """The last step's flops by kernel; empty if they are not counted."""
        return {}


@dataclass(frozen=True, slots=True)
class Budget:
    """The length of a measurement: rounds until `seconds` have passed, but at least `min_rounds` and at most
    `max_rounds`.

    Up to `warm_ups` rounds before them do not count; there is more than one only while they are short. A contestant's
    turn in a round takes `untimed_steps`, which allocate memory again, and then the median of `timed_steps`.
    """

    seconds: float
    min_rounds: int
    max_rounds: int
    warm_ups: int = 2
    timed_steps: int = 1
    untimed_steps: int = 0


@dataclass(frozen=True, slots=True)
class Rounds:
    """One contestant's results in the rounds that count: one timing per round, and the flops of one step by kernel."""

    timings: tuple[Timing, ...]
    flops: Mapping[str, int]

    @property
    def device_s(self) -> list[float]:
        return [timing.device_s for timing in self.timings]

    @property
    def host_s(self) -> list[float]:
        return [timing.host_s for timing in self.timings]


def interleave(
    contestants: Mapping[str, Contestant], budget: Budget, progress: Progress, title: str
) -> dict[str, Rounds]:
    """Run all contestants in turn. Return each one's results, round by round, without the warm-up rounds."""
    progress(f"{title}: warming up {', '.join(contestants)}")
    started = time.perf_counter()
    for done in range(budget.warm_ups):
        if done and time.perf_counter() - started > budget.seconds / 8:
            break
        for contestant in contestants.values():
            take_turn(contestant, budget)
    timings: dict[str, list[Timing]] = {name: [] for name in contestants}
    names = list(contestants)
    started = reported = time.perf_counter()
    for done in range(budget.max_rounds):
        now = time.perf_counter()
        if done >= budget.min_rounds and now - started >= budget.seconds:
            break
        if done == 1 or now - reported > 5.0:
            reported = now
            times = ", ".join(f"{name} {1e3 * min(taken).device_s:.0f}" for name, taken in timings.items())
            progress(f"{title}: {done} rounds, ms so far: {times}")
        for name in names:
            timings[name].append(take_turn(contestants[name], budget))
        names.reverse()
    return {name: Rounds(tuple(timings[name]), dict(contestants[name].flops)) for name in contestants}


def take_turn(contestant: Contestant, budget: Budget) -> Timing:
    for _ in range(budget.untimed_steps):
        contestant.step()
    device, host = zip(*(contestant.step() for _ in range(budget.timed_steps)), strict=True)
    contestant.release()
    return Timing(median(device), median(host))
