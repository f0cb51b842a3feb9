"""ZeRO-3, P_os+g+p: parameters are partitioned too. Gather a unit, use it, free it.

    bytes per rank     (2 + 2 + K) Psi/N          half types; K = 12 for Adam
    volume per step    3 Psi (N-1)/N elements     all_gather forward, all_gather backward, reduce_scatter

ZeRO paper, sections 5.3 and 7.2.2. A tied buffer of V D elements is gathered at each of its uses and
reduced once: 3 Psi + 2 V D. With A micro-batches: 3 A Psi. What stays gathered is a choice:
`keep_last_unit` keeps the last unit from the end of forward to the start of backward (3 Psi less that
unit), `reshard_after_forward=False` keeps every unit (FSDP's word; 2 Psi, and ZeRO-2's peak).
"""

from __future__ import annotations

from zerosim.comm.collectives import Comm
from zerosim.device import Buffer, Device
from zerosim.nn import Unit
from zerosim.optim.updater import Updater
from zerosim.parallel.base import Strategy
from zerosim.sharding import Flat


class Zero3(Strategy):
    keeps_params = False
    keeps_grads = False

    def __init__(
        self,
        comm: Comm,
        device: Device,
        updater: Updater,
        *,
        reshard_after_forward: bool = True,
        keep_unit: str | None = None,
    ) -> None:
        super().__init__(comm, device, updater)
        self.reshard_after_forward = reshard_after_forward
        self.keep_unit = keep_unit

    def pre_forward(self, unit: Unit) -> None:
        if unit.flat.param is None:
            unit.flat.unshard(self.gather(unit.flat))

    def post_forward(self, unit: Unit) -> None:
        if self.reshard_after_forward and unit.name != self.keep_unit:
            unit.flat.reshard()

    def pre_backward(self, unit: Unit) -> None:
        if unit.flat.param is None:
            unit.flat.unshard(self.gather(unit.flat))

    def post_backward(self, unit: Unit) -> None:
        if self.reshard_after_forward or unit.reduces:
            unit.flat.reshard()  # free before the reduction: lower peak
        if unit.reduces:  # a tied buffer: after its last use only
            unit.flat.add_grad_shard(self.reduce(unit.flat, unit.flat.take_grad()))

    def gather(self, flat: Flat) -> Buffer:
        return self.comm.all_gather(flat.shard())

    def reduce(self, flat: Flat, grad: Buffer) -> Buffer | None:
        return self.comm.reduce_scatter(grad, out=flat.new_grad_shard())
