"""ZeRO-3, P_os+g+p: parameters are partitioned too. Gather a unit, use it, free it.

    bytes per rank     (2 + 2 + K) Psi/N          half types; K = 12 for Adam
    volume per step    3 Psi (N-1)/N elements     all_gather forward, all_gather backward, reduce_scatter

ZeRO paper, sections 5.3 and 7.2.2. A tied buffer of V D elements is gathered at each of its uses and reduced once: 3
Psi + 2 V D. With A microbatches: 3 A Psi, or without `sync`, which sums whole gradients, 2 A Psi + Psi. Options beyond
the paper are in other files: which parameters stay gathered or are prefetched (`gathered.py`), when gradients are
reduced (`reducer.py`), and by which collectives (`exchange.py`).
"""

from __future__ import annotations

from zerosim.nn import Unit
from zerosim.parallel.gathered import Gathered
from zerosim.parallel.stage import Stage
from zerosim.tensor.flat import Flat


class Zero3(Stage):
    """Every rank holds its slice of everything."""

    stage = 3
    gathered: Gathered

    def default_gathered(self) -> Gathered:
        return Gathered(self.exchange)

    def pre_forward(self, unit: Unit) -> None:
        self.gathered.unshard(unit)  # all_gather, unless already gathered or in flight

    def post_forward(self, unit: Unit) -> None:
        self.gathered.reshard_after_forward(unit)  # free it, unless it stays

    def pre_backward(self, unit: Unit) -> None:
        self.gathered.unshard(unit)

    def post_backward(self, unit: Unit) -> None:
        for flat in self.gathered.release(unit):  # frees the unit before the reduction: lower peak
            self.reduce(flat)

    post_input_grad = post_backward

    def publish_params(self, flat: Flat) -> None:
        self.gathered.publish(flat)
