"""Buckets: finished gradients collected across units until they fill one collective.

Where gradients are kept whole anyway (DDP, ZeRO-1) waiting costs no memory and saves launches. A
unit larger than a bucket is cut by the collective itself (`comm/`).
"""

from __future__ import annotations

from zerosim.tensor.flat import Flat


class Bucket:
    """Flats that wait together, up to `capacity` bytes of gradients (None: one flat at a time)."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self._waiting: list[Flat] = []
        self._waiting_bytes = 0

    def add(self, flat: Flat) -> list[Flat]:
        """Put one flat in; returns those that had to leave for it, to be reduced now."""
        nbytes = flat.padded_numel * flat.grad_dtype.itemsize
        leaving = self.flush() if self._waiting_bytes + nbytes > (self.capacity or 0) else []
        self._waiting.append(flat)
        self._waiting_bytes += nbytes
        return leaving

    def flush(self) -> list[Flat]:
        """Everything that waits."""
        leaving, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return leaving
