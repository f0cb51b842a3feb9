"""ZeRO-1, P_os: optimizer states are partitioned. Each rank updates its slice, then all slices are gathered.

    bytes per rank     2 Psi + 2 Psi + K Psi/N    half types; K = 12 for Adam
    volume per step    2 Psi (N-1)/N elements     reduce_scatter of gradients, all_gather of parameters

ZeRO paper, sections 5.1 and 7.2.1. Both collectives work in place: a rank's slice of the gradient is
reduced where it stands, and new parameters are gathered over the old ones. Where reductions overlap,
backward goes on meanwhile, and all land when it is over. With accumulation, gradients are summed
first and reduced once.
"""

from __future__ import annotations

from typing import Any

from zerosim.comm.collectives import Comm
from zerosim.comm.group import Work
from zerosim.device.device import Buffer, Device
from zerosim.nn import Unit
from zerosim.optim.updater import Updater
from zerosim.parallel.base import Strategy
from zerosim.parallel.bucket import Bucket, gather_params
from zerosim.tensor.flat import Flat


class Zero1(Strategy):
    """Every rank holds all parameters and gradients, and the optimizer states of its slice."""

    def __init__(self, comm: Comm, device: Device, updater: Updater) -> None:
        super().__init__(comm, device, updater)
        self.bucket = Bucket(comm.bucket_bytes)

    def post_backward(self, unit: Unit) -> None:
        for flat in unit.flats if unit.reduces else ():
            flat.add_grad_whole(flat.take_grad())
            if self.last and self.buffers is not None:
                self.buffers.add(flat, flat.take_whole(), self.launch_reduce)
            elif self.last:
                for flats in self.bucket.add(flat):
                    self.reduce(flats)

    def end_backward(self) -> None:
        if flats := self.bucket.flush():
            self.reduce(flats)
        self.land()
        if self.updater.grad_memory.own_only:
            for flat in self.flats:
                with self.device.scope(unit=flat.module):
                    flat.keep_own_grad()

    def reduce(self, flats: list[Flat]) -> None:
        """Average these flats' gradients in one call: each own slice, where it stands."""
        grads = [flat.whole_grad() for flat in flats]
        own = [grad[flat.own.start : flat.own.stop] for flat, grad in zip(flats, grads, strict=True)]

        def keep(_: Any) -> None:
            for flat, shard in zip(flats, own, strict=True):
                flat.grad_shard = shard

        self.later(self.launch_in_place(grads, own), keep)
        if not self.overlaps:
            self.land()

    def launch_in_place(self, grads: list[Buffer], own: list[Buffer]) -> Work[Any]:
        """The reduction itself, under way; `own` are the windows of the own slices."""
        return self.comm.launch_reduce_scatter(grads, out=own)

    def publish_params(self, flat: Flat) -> None:
        gather_params(self.comm, flat, self.allgather_bucket)
