"""The simulated ledger held against a real allocator: what a rank's memory pool said, mark by mark.

A GPU's pool hands out blocks of whole 512 bytes. So the bytes that it has in use must be the ledger's live
bytes plus what rounding each of them up costs, both counted from the same record; anything else would be memory
that the ledger does not know of, or memory that it wrongly thinks is there. Kernels' own scratch is gone by
the time a mark is passed. Not in any pool: CUDA's context, compiled kernels, cuBLAS's workspaces.

Source: CuPy, Memory Management (`MemoryPool`, allocations rounded up to 512 bytes).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from zerosim.device.events import Alloc, Event, Free, Mark, Pool

BLOCK_BYTES = 512


class PoolRow(NamedTuple):
    """One mark of one rank: the ledger's live bytes, the price of rounding them up, and what the pool said."""

    step: int
    mark: str
    live_bytes: int
    rounding_bytes: int
    used_bytes: int
    held_bytes: int

    @property
    def unexplained_bytes(self) -> int:
        return self.used_bytes - self.live_bytes - self.rounding_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "unexplained_bytes": self.unexplained_bytes}


class PoolLedger:
    """A row for each mark at which a pool was asked; none on a backend without one."""

    def __init__(self) -> None:
        self.rows: list[PoolRow] = []
        self._blocks: dict[int, int] = {}
        self._live_bytes = 0
        self._rounding_bytes = 0
        self._mark = ""

    def read(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Alloc):
                self._blocks[event.id] = event.nbytes
                self._count(event.nbytes, 1)
            elif isinstance(event, Free):
                self._count(self._blocks.pop(event.id), -1)
            elif isinstance(event, Mark):
                self._mark = event.name
            elif isinstance(event, Pool):
                counted = (self._live_bytes, self._rounding_bytes)
                self.rows.append(PoolRow(event.scope.step, self._mark, *counted, event.used_bytes, event.held_bytes))

    def _count(self, nbytes: int, sign: int) -> None:
        self._live_bytes += sign * nbytes
        self._rounding_bytes += sign * (-nbytes % BLOCK_BYTES)
