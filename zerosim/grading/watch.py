"""How long an answer may take, as seen by those who look at it: a machine that was asleep is no answer that is stuck.

    PATIENCE_S    without any kernel or collective (or of one call of a function): ended inside, with its line
    LIMIT_S       for all of an exercise's runs: ended inside, with its line
    SILENCE_S     without any sign of the process: it holds the interpreter, and is ended from outside

Owns these bounds and the looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.05
PATIENCE_S = 1.5
LIMIT_S = 30.0
SILENCE_S = 5.0


class Lap:
    """Seconds since the last look, but not more than one: nobody looked in between, so nobody ran."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def seconds(self) -> float:
        last, self._last = self._last, time.monotonic()
        return min(self._last - last, 1.0)


class Watch:
    """The time that an answer has taken; `beat` is called at each look, as a sign of life."""

    def __init__(self, beat: Callable[[], None] = lambda: None) -> None:
        self.beat = beat
        self._lap = Lap()
        self._passed_s = 0.0

    def look(self) -> None:
        self._passed_s += self._lap.seconds()
        self.beat()

    @property
    def is_over(self) -> bool:
        return self._passed_s >= LIMIT_S
