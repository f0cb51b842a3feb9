"""ZeRO-2, P_os+g: gradients are partitioned too. Each unit's is reduced as backward goes, a slice stays.

    bytes per rank     2 Psi + (2 + K) Psi/N      half types; K = 12 for Adam
    volume per step    2 Psi (N-1)/N elements     reduce_scatter of gradients, all_gather of parameters

ZeRO paper, sections 5.2 and 7.2.1. The whole gradient of one unit lives from its backward to its
reduction, or, where reductions overlap, until the next unit's begins. With A micro-batches each one
is reduced and added onto the slice: (A + 1) Psi (N-1)/N.
"""

from __future__ import annotations

from zerosim.device.device import Buffer
from zerosim.nn import Unit
from zerosim.parallel.base import Strategy
from zerosim.parallel.bucket import gather_params
from zerosim.tensor.flat import Flat


class Zero2(Strategy):
    """Every rank holds all parameters, and gradients and optimizer states of its slice."""

    keeps_grads = False

    def post_backward(self, unit: Unit) -> None:
        for flat in unit.flats if unit.reduces else ():
            if self.buffers is not None:
                self.buffers.add(flat, [flat.take_grad()], self.launch_reduce)
            elif self.overlaps:
                self.reduce_beside(flat)
            else:
                self.keep_shard(flat, self.reduce(flat, flat.take_grad()))

    def reduce(self, flat: Flat, grad: Buffer) -> Buffer | None:
        """The own slice of a whole gradient, averaged; None on a rank that has no part of it."""
        return self.comm.reduce_scatter(grad, out=flat.new_grad_shard())

    def publish_params(self, flat: Flat) -> None:
        gather_params(self.comm, flat, self.allgather_bucket)
