"""Stage 0, distributed data parallel: every rank holds everything, gradients are all-reduced.

    bytes per rank     2 Psi + 2 Psi + K Psi      half types; K = 12 for Adam
    volume per step    2 Psi (N-1)/N elements     all_reduce of gradients, in buckets

ZeRO paper, sections 2.1 and 7.1. A bucket is reduced as soon as it is full, in place in the
gradients' own memory. With accumulation, gradients are summed first and reduced once.
"""

from __future__ import annotations

from zerosim.comm.collectives import Comm
from zerosim.device.device import Device
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

    def post_backward(self, unit: Unit) -> None:
        if unit.reduces:
            unit.flat.add_grad_whole(unit.flat.take_grad())
            if self.last:
                self.reduce(self.bucket.add(unit.flat))

    def end_backward(self) -> None:
        self.reduce(self.bucket.flush())

    def reduce(self, flats: list[Flat]) -> None:
        """Average these flats' whole gradients in one call, in place."""
        if flats:
            self.comm.all_reduce([flat.whole_grad() for flat in flats])
            for flat in flats:
                flat.grad_shard = flat.whole_grad()  # the own slice is all of it
