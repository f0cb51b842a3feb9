"""The balance of experts over data ranks: how often all of them chose each, added up once a step, when backward ends.

    per step     1 all-reduce of E fp32 numbers for each layer with experts, in one call; with --bias-rate alone

Source: Megatron-LM, core/distributed/finalize_model_grads.py, _update_router_expert_bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zerosim.comm.collectives import Comm
from zerosim.config import RunConfig
from zerosim.device.device import Buffer, Kind
from zerosim.device.events import Copy
from zerosim.dtypes import fp32
from zerosim.nn.balance import Balance
from zerosim.nn.kept_routes import KeptRoutes
from zerosim.optim.updater import Updater
from zerosim.parallel.pieces import Pieces, Place
from zerosim.parallel.shards import Gradients, Shards
from zerosim.placement.memories import HOST
from zerosim.placement.mesh import CUTS, DATA, SHARES
from zerosim.tensor.flat import Flat


class Balanced(Gradients):
    """Gradients whose step also ends the balance's."""

    def __init__(self, gradients: Gradients, balance: Balance, comm: Comm) -> None:
        self.gradients, self.balance, self.comm, self.place = gradients, balance, comm, gradients.place

    def keep(self, flat: Flat, grad: Buffer | None) -> None:
        self.gradients.keep(flat, grad)

    def keep_in_place(self, flat: Flat, own: Buffer | None) -> None:
        self.gradients.keep_in_place(flat, own)

    def close_backward(self) -> None:
        self.gradients.close_backward()

    def grad(self, flat: Flat) -> Buffer | None:
        return self.gradients.grad(flat)

    def end_backward(self, flats: Sequence[Flat]) -> None:
        self.gradients.end_backward(flats)
        balance, device = self.balance, self.comm.device
        own = [load for name in balance.biases for load in balance.loads[name]]
        if not own:
            return
        total = device.alloc((len(own),), fp32, Kind.TEMP)
        device.backend.from_host(own, total.array)
        if self.comm.size > 1:
            self.comm.all_reduce(total, op="sum", purpose="control")
        device.recorder.add(Copy(device.where, total.memory, HOST, total.nbytes, "control"))
        values, found = list(map(float, device.backend.to_host(total.array))), dict[str, list[float]]()
        for name in balance.biases:
            count = len(balance.loads[name])
            found[name], values = values[:count], values[count:]
        balance.move(found)


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add what routers have from step to step, and what recomputed blocks keep of them."""
    if not config.model.has_experts:
        return made
    balance, before = Balance(config.experts.bias_rate, config.data.accumulate), made.shards

    def shards(updater: Updater) -> Shards:
        assert place.groups is not None
        control = updater.control  # alone: layers that held the updater would keep its buffers
        balance.scale = lambda: control.loss_scale
        inner = before(updater)
        if not balance.rate:
            return inner
        others = CUTS if place.groups.mesh.is_folded else ()  # tp's ranks have tokens of their own
        return inner._replace(gradients=Balanced(inner.gradients, balance, place.groups(*DATA, *SHARES, *others)))

    routes = KeptRoutes() if config.experts.keep_router else None
    return made._replace(group=replace(made.group, balance=balance, routes=routes), shards=shards)
