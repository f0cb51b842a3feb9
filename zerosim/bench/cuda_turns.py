"""How contestants on a GPU take turns: their steps timed on the device and on the host, their memory given back.

A turn is one step that does not count, in which memory is taken again, then a few timed ones, of which the
median is the turn's value; then the contestant gives back what its memory pool holds and does not use, so that
nobody works in another's memory. The rounds themselves are `contest.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Protocol

from zerosim.bench.contest import Effort, Say, interleave


class Timing(NamedTuple):
    """Seconds of one step: between two events on the device, and on the host's clock around them."""

    device_s: float
    host_s: float


class GpuContestant(Protocol):
    """One of those compared on a GPU. `flops` are those of its last step by kernel, empty where nobody counts them."""

    @property
    def flops(self) -> Mapping[str, int]: ...

    def step(self) -> Timing:
        """One step, from an idle device to an idle device."""
        ...

    def release(self) -> None:
        """Give back the memory that is held and not used."""
        ...


class Turns:
    """A contestant of `contest.interleave`: one turn at each `step`; `timings` has one value for each."""

    def __init__(self, contestant: GpuContestant, steps: int) -> None:
        self._contestant = contestant
        self._steps = steps
        self.timings: list[Timing] = []

    def step(self) -> float:
        self._contestant.step()
        timed = [self._contestant.step() for _ in range(self._steps)]
        self._contestant.release()
        device, host = zip(*timed, strict=True)
        self.timings.append(Timing(median(device), median(host)))
        return self.timings[-1].device_s


@dataclass(frozen=True, slots=True)
class Rounds:
    """What one contestant did in the rounds that count: one timing each, and the flops of one step by kernel."""

    timings: tuple[Timing, ...]
    flops: Mapping[str, int]

    @property
    def device_s(self) -> list[float]:
        return [timing.device_s for timing in self.timings]

    @property
    def host_s(self) -> list[float]:
        return [timing.host_s for timing in self.timings]


def take_turns(
    contestants: Mapping[str, GpuContestant], steps: int, effort: Effort, say: Say, title: str
) -> dict[str, Rounds]:
    """All contestants in turn, `steps` timed steps each; what each did, round by round, without the warm-up."""
    turns = {name: Turns(contestant, steps) for name, contestant in contestants.items()}
    measured = interleave(turns, effort, say, title)
    return {
        name: Rounds(tuple(turns[name].timings[-len(measured[name]) :]), dict(contestants[name].flops))
        for name in contestants
    }
