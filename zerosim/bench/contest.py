"""How contestants are timed: in turn, on one machine that others use too.

A contestant is anything with a `step` that returns the seconds it took. In each round every contestant
takes one step, in an order that is turned round from one round to the next (A B C, C B A, ...): what slows the
machine for a while hits all of them alike, and nobody always follows the same neighbour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

Say = Callable[[str], None]
"""Takes one line of progress."""


class Contestant(Protocol):
    """One of those compared."""

    def step(self) -> float:
        """Do the work once; the seconds it took."""
        ...


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: rounds until `seconds` have passed, but at least `least` and at most `most`.

    Before them up to `warm_ups` rounds that do not count, more than one only while they are short.
    """

    seconds: float
    least: int
    most: int
    warm_ups: int = 2


def interleave(contestants: Mapping[str, Contestant], effort: Effort, say: Say, title: str) -> dict[str, list[float]]:
    """Seconds by contestant, one per round. The warm-up rounds are not in them."""
    say(f"{title}: warming up {', '.join(contestants)}")
    started = time.perf_counter()
    for done in range(effort.warm_ups):
        if done and time.perf_counter() - started > effort.seconds / 8:
            break
        for contestant in contestants.values():
            contestant.step()
    measured: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    started = told = time.perf_counter()
    for done in range(effort.most):
        now = time.perf_counter()
        if done >= effort.least and now - started >= effort.seconds:
            break
        if done == 1 or now - told > 5.0:
            told = now
            times = ", ".join(f"{name} {1e3 * min(times):.0f}" for name, times in measured.items())
            say(f"{title}: {done} rounds, ms so far: {times}")
        for name in names:
            measured[name].append(contestants[name].step())
        names.reverse()
    return measured
