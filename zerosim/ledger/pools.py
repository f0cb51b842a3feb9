"""Compare the simulated ledger with a real allocator: a rank's memory pool, mark by mark.

A GPU's pool hands out blocks of whole 512 bytes. So its bytes in use must be the ledger's live
bytes plus the cost of rounding each buffer up, both counted from the same record. Any difference would be memory
that the ledger misses, or memory that it wrongly counts. Kernels have freed their scratch before
a mark. CUDA's context, compiled kernels and cuBLAS's workspaces are in no pool.

Source: CuPy, Memory Management (`MemoryPool`, allocations rounded up to 512 bytes).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from zerosim.device.events import Alloc, Event, Free, Mark, Pool, on_device

BLOCK_BYTES = 512


class PoolRow(NamedTuple):
    """One mark of one rank: the ledger's live bytes, the cost of rounding up, and the pool's bytes."""

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
    """A row for each mark at which a pool was queried; no rows on a backend without pools."""

    def __init__(self) -> None:
        self.rows: list[PoolRow] = []
        self._blocks: dict[int, int] = {}
        self._live_bytes = 0
        self._rounding_bytes = 0
        self._mark = ""

    def read(self, events: list[Event]) -> None:
        for event in on_device(events):
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
