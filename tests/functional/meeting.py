"""Ranks of a group as threads, for ops that exchange a few numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np

from zerosim.device.device import Buffer


class Meeting:
    """A group of ranks that combine their buffers."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.given = size, threading.Barrier(size, timeout=60), dict[int, Any]()

    def of(self, rank: int) -> Any:
        """One rank's view of the group."""

        def all_reduce(buffer: Buffer, *, op: str, purpose: str = "") -> None:
            self.given[rank] = buffer.array.copy()
            self.barrier.wait()
            every = np.stack([self.given[one] for one in range(self.size)])
            self.barrier.wait()
            buffer.array[...] = every.max(0) if op == "max" else every.sum(0)

        def sum_over(buffer: Buffer) -> None:
            all_reduce(buffer, op="sum")

        return SimpleNamespace(size=self.size, sum_over=sum_over, all_reduce=all_reduce)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Run every rank's work side by side; their results in order."""
        with ThreadPoolExecutor(self.size) as ranks:
            return list(ranks.map(work, range(self.size)))
