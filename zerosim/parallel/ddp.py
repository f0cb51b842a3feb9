"""Stage 0, distributed data parallel: every rank holds everything, gradients are all-reduced.

    bytes per rank     2 Psi + 2 Psi + K Psi      half types; K = 12 for Adam
    volume per step    2 Psi (N-1)/N elements     all_reduce of gradients, in buckets

ZeRO paper, sections 2.1 and 7.1. A bucket is reduced as soon as it is full, in place in the
gradients' own memory or, as PyTorch's DDP does by default, in a copy that lives through the run:
2 Psi bytes more. Where it overlaps, backward goes on meanwhile, and all buckets land when it is over:
that takes no memory. With accumulation, gradients are summed first and reduced once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerosim.comm.collectives import Comm
from zerosim.device.device import Buffer, Device, Kind
from zerosim.nn import Unit
from zerosim.optim.updater import Updater
from zerosim.parallel.base import Strategy
from zerosim.parallel.bucket import Bucket
from zerosim.placement.partition import Whole
from zerosim.tensor.flat import Flat


class DDP(Strategy):
    """Every rank holds everything."""

    partition = Whole()
    sees_all_grads = True

    def __init__(self, comm: Comm, device: Device, updater: Updater) -> None:
        super().__init__(comm, device, updater)
        self.bucket = Bucket(comm.bucket_bytes)
        self._copies: dict[str, Buffer] = {}  # of gradients, by flat

    def place(self, flats: Sequence[Flat], write: Callable[[Flat], None]) -> None:
        super().place(flats, write)
        if self.updater.grad_memory.bucket_copies:
            for flat in flats:
                with self.device.scope(unit=flat.module):
                    self._copies[flat.name] = self.device.alloc((flat.numel,), flat.grad_dtype, Kind.COMM)

    def post_backward(self, unit: Unit) -> None:
        for flat in unit.flats if unit.reduces else ():
            flat.add_grad_whole(flat.take_grad())
            for flats in self.bucket.add(flat) if self.last else ():
                self.reduce(flats)

    def end_backward(self) -> None:
        if flats := self.bucket.flush():
            self.reduce(flats)

    def reduce(self, flats: list[Flat]) -> None:
        """Average these flats' whole gradients in one call, in place or in their copies."""
        grads = [flat.whole_grad() for flat in flats]
        copies = [self._copies.get(flat.name, grad) for flat, grad in zip(flats, grads, strict=True)]

        def keep(reduced: list[Buffer]) -> None:
            self._copy(reduced, grads)
            for flat, grad in zip(flats, grads, strict=True):
                flat.grad_shard = grad  # the own slice is all of it

        self._copy(grads, copies)
        self.later(self.comm.launch_all_reduce(copies), keep)
        if not self.overlaps:
            self.land()

    def _copy(self, sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
        for source, target in zip(sources, targets, strict=True):
            if source is not target:
                self.device.kernel(0, self.device.backend.copy, source.array, target.array)
