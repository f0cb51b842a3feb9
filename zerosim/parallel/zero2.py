"""ZeRO-2, P_os+g: gradients are partitioned too. Each unit's gradient is reduced during backward, and each rank keeps a
slice.

    bytes per rank     2 Psi + (2 + K) Psi/N      half types; K = 12 for Adam
    volume per step    2 Psi (N-1)/N elements     reduce_scatter of gradients, all_gather of parameters

ZeRO paper, sections 5.2 and 7.2.1. The whole gradient of one unit lives from its backward to its reduction or, if
reductions are waited for late, until the next unit's begins. With A microbatches each one is reduced and added to the
slice: (A + 1) Psi (N-1)/N. Without `sync` whole gradients are summed, 2 Psi bytes or 4 from the first backward to the
last, and reduced once: 2 Psi (N-1)/N.
"""

from __future__ import annotations

from zerosim.nn import Unit
from zerosim.parallel.stage import Stage
from zerosim.tensor.flat import Flat


class Zero2(Stage):
    """Every rank holds all parameters, and the gradients and optimizer states of its slice."""

    stage = 2

    def pre_forward(self, unit: Unit) -> None:
        self.gathered.wait(unit)  # new parameters, if their gathers overlap with forward

    def post_backward(self, unit: Unit) -> None:
        for flat in unit.completes:
            self.reduce(flat)

    def publish_params(self, flat: Flat) -> None:
        self.gathered.publish(flat)  # all_gather the new slices over the old ones, now or in the next forward
