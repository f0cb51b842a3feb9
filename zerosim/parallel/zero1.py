"""ZeRO-1, P_os: optimizer states are partitioned.

    bytes per rank     2 Psi + 2 Psi + K Psi/N    half types; K = 12 for Adam
    volume per step    2 Psi (N-1)/N elements     reduce_scatter of gradients, all_gather of parameters

ZeRO paper, sections 5.1 and 7.2.1. Each rank reduces and updates its own slice, in place in the whole gradients; then
the new parameters are gathered over the old ones. With accumulation, gradients are summed first and reduced once. A
pipeline reduces after it has drained, unless reductions overlap (`reducer.py`).
"""

from __future__ import annotations

from zerosim.comm.collectives import Comm
from zerosim.nn import Unit
from zerosim.parallel.exchange import Slices
from zerosim.parallel.reducer import InBuckets, Reducer
from zerosim.parallel.stage import Stage
from zerosim.tensor.flat import Flat


class Zero1(Stage):
    """Every rank holds all parameters and gradients, and the optimizer states of its slice."""

    stage = 1

    def default_reducer(self, comm: Comm) -> Reducer:
        return InBuckets(Slices(), comm.bucket_bytes)

    def pre_forward(self, unit: Unit) -> None:
        self.gathered.wait(unit)  # new parameters, if their gathers overlap with forward

    def post_backward(self, unit: Unit) -> None:
        for flat in unit.completes:
            flat.add_grad_whole(flat.take_grad())
            if self.last:
                self.reducer.reduce(flat)

    def publish_params(self, flat: Flat) -> None:
        self.gathered.publish(flat)  # all_gather the new slices over the old ones, now or in the next forward
