"""Stage 0, distributed data parallel: every rank holds everything, gradients are all-reduced.

    bytes per rank     2 Psi + 2 Psi + K Psi      half types; K = 12 for Adam
    volume per step    2 Psi (N-1)/N elements     all_reduce of gradients, in buckets

ZeRO paper, sections 2.1 and 7.1. A bucket is reduced as soon as it is full, in place in the gradients' own memory or,
as PyTorch's DDP does by default, in a copy that lives through the run: 2 Psi bytes more. With accumulation, gradients
are summed first and reduced once. A pipeline reduces after it has drained, unless reductions overlap (`reducer.py`).
"""

from __future__ import annotations

from zerosim.comm.collectives import Comm
from zerosim.nn import Unit
from zerosim.parallel.exchange import AllReduce
from zerosim.parallel.reducer import InBuckets, Reducer
from zerosim.parallel.stage import Stage


class DDP(Stage):
    """Every rank holds everything."""

    stage = 0
    sees_all_grads = True

    def default_reducer(self, comm: Comm) -> Reducer:
        return InBuckets(AllReduce(), comm.bucket_bytes)

    def post_backward(self, unit: Unit) -> None:
        for flat in unit.completes:
            flat.add_grad_whole(flat.take_grad())
            if self.last:
                self.reducer.reduce(flat)
