"""Buckets: finished gradients collected across units until they fill one collective.

`Bucket` collects them where they are: where gradients are kept whole anyway (DDP, ZeRO-1) waiting costs no memory and
saves launches. A unit larger than a bucket is cut by the collective itself (`comm/`).

`ReduceBuffers` are ZeRO-R's constant-size buffers, CB (ZeRO paper, section 6.2): gradients are copied into a buffer
whose size does not depend on the model's, and reduced from there; the paper's example of one that does, a fused fp32
buffer of all gradients, is 12 GB for 3B parameters. Source of the rules: DeepSpeed edaa722, stage_1_and_2.py
(setup_buckets: reduce_bucket_size elements, two of them under overlap_comm, for each backward), stage3.py (one, from
start to end); a gradient that is larger than a buffer is reduced where it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from zerosim.comm.collectives import Comm
from zerosim.comm.group import Work
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import DType
from zerosim.tensor.flat import Flat

Launch = Callable[[Sequence[Flat], list[Buffer]], tuple[Work[Any], Callable[[Any], None]]]
"""Reduce these whole gradients in one call: what is under way, and what is done with its result."""


class Bucket:
    """Flats that wait together, up to `capacity` bytes of gradients (None: one flat at a time)."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self._waiting: list[Flat] = []
        self._waiting_bytes = 0

    def add(self, flat: Flat) -> list[list[Flat]]:
        """Put one flat in; returns what is to be reduced now, call by call: those that had to leave for it, and those
        beside which there is no more room."""
        nbytes = flat.padded_numel * flat.grad_dtype.itemsize
        leaving = [self.flush()] if self._waiting_bytes + nbytes > (self.capacity or 0) else []
        self._waiting.append(flat)
        self._waiting_bytes += nbytes
        if self._waiting_bytes >= (self.capacity or 0):
            leaving.append(self.flush())
        return [flats for flats in leaving if flats]

    def flush(self) -> list[Flat]:
        """Everything that waits."""
        leaving, self._waiting, self._waiting_bytes = self._waiting, [], 0
        return leaving


class ReduceBuffers:
    """`count` buffers of `numel` elements each; with two, one is filled while the other is reduced.

    They are there from the beginning of a backward to its end or, `lasting`, to the end of the run.
    """

    def __init__(self, device: Device, numel: int, *, count: int = 1, lasting: bool = False) -> None:
        self.device = device
        self.numel = numel
        self.count = count
        self.lasting = lasting
        self._buffers: deque[Buffer] = deque()  # the first is being filled
        self._under_way: deque[tuple[Work[Any], Callable[[Any], None]]] = deque()
        self._flats: list[Flat] = []
        self._windows: list[Buffer] = []

    def open(self, dtype: DType) -> None:
        """Take the memory, if it is not there."""
        if not self._buffers:
            self._buffers.extend(self.device.alloc((self.numel,), dtype, Kind.COMM) for _ in range(self.count))

    def add(self, flat: Flat, grad: list[Buffer], launch: Launch) -> None:
        """Copy a finished gradient in, which is taken out of the list and goes; reduce what was there if it is full."""
        used, numel = sum(window.numel for window in self._windows), grad[0].numel
        if used + numel > self.numel:
            self._reduce(launch)
            used = 0
        if numel > self.numel:
            work, then = launch([flat], [grad.pop()])
            then(work.wait())
            return
        window = self._buffers[0][used : used + numel]
        self.device.kernel(0, self.device.backend.copy, grad.pop().array, window.array)
        self._flats.append(flat)
        self._windows.append(window)

    def flush(self, launch: Launch) -> None:
        """Reduce what is left, and wait for it."""
        self._reduce(launch)
        while self._under_way:
            self._land()
        if not self.lasting:
            self._buffers.clear()

    def _reduce(self, launch: Launch) -> None:
        if self._windows:
            self._under_way.append(launch(self._flats, self._windows))
            self._flats, self._windows = [], []
            if len(self._under_way) == self.count:  # the buffer that is filled next is being reduced
                self._land()
            self._buffers.rotate(-1)

    def _land(self) -> None:
        work, then = self._under_way.popleft()
        then(work.wait())


def gather_params(comm: Comm, flat: Flat, bucket: int) -> None:
    """All ranks' new parameters over the old ones. With a `bucket` of some elements they arrive there, piece by piece,
    and are copied to where they belong: what a list of tensors costs (DeepSpeed edaa722, all_gather_dp_groups with
    allgather_bucket_size, where there is no all_gather_into_tensor)."""
    shard, whole = flat.shard(), flat.whole_param()
    if not bucket or comm.size == 1:
        comm.all_gather(shard, out=whole)
        return
    most = max(1, bucket // comm.size)
    for start in range(0, shard.numel, most):
        piece = shard[start : start + most]
        arrived = comm.all_gather(piece, kind=Kind.COMM)
        for rank in range(comm.size):
            part, at = arrived[rank * piece.numel : (rank + 1) * piece.numel], rank * shard.numel + start
            flat.device.kernel(0, flat.device.backend.copy, part.array, whole[at : at + piece.numel].array)
