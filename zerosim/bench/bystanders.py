"""How much of the machine went to others while a benchmark ran: a figure taken beside a compiler is worth less.

Reads /proc/stat; elsewhere nothing is known and None is said.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

JIFFIES_PER_S = 100  # what /proc/stat counts in (USER_HZ), whatever the kernel's own clock


class Bystanders:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._busy_s = _busy_s()
        self._own_s = _own_s()

    def share(self) -> float | None:
        """The share of all cores' time that other processes took, 0 to 1."""
        busy_s = _busy_s()
        if busy_s is None or self._busy_s is None:
            return None
        passed_s = (time.perf_counter() - self._started) * (os.cpu_count() or 1)
        others_s = busy_s - self._busy_s - (_own_s() - self._own_s)
        return round(min(1.0, max(0.0, others_s / passed_s)), 3)


def _busy_s() -> float | None:
    """Seconds of all cores since boot that were not idle."""
    try:
        words = Path("/proc/stat").read_text("utf-8").split("\n", 1)[0].split()
        user, nice, system, _idle, _wait, *interrupts_and_steal = map(int, words[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(interrupts_and_steal)) / JIFFIES_PER_S


def _own_s() -> float:
    """Seconds that this process and its children that have ended have used."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
