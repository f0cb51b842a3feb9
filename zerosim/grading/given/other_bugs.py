"""The strategies and the schedule of `bugs.py`, each with another bug: variants of an exercise are drawn from both.

A class has the name of the one that it replaces, and one repair suits both. Nothing here names the bugs.
"""

from __future__ import annotations

from zerosim.device.device import Buffer
from zerosim.grading.given import bugs
from zerosim.nn import Unit
from zerosim.parallel.base import Strategy
from zerosim.parallel.schedule import Action, Backward, Forward
from zerosim.tensor.flat import Flat


class Thrifty(bugs.Shared):
    """ZeRO-3."""

    def gather(self, flat: Flat) -> None:
        flat.unshard(self.comm.all_gather(flat.shard()))
        self.first = flat.whole_param()[:1]  # to look at, one element


class Mean(bugs.Mean):
    """DDP."""

    def mean(self, grad: Buffer) -> None:
        self.comm.all_reduce(grad, op="sum")
        self.device.kernel(grad.numel, self.device.backend.divide, grad.array, float(len(self.flats)), grad.array)


class Shared(bugs.Shared):
    """ZeRO-3 on a model whose head is its token table."""

    def post_backward(self, unit: Unit) -> None:
        unit.flat.reshard()
        grad = unit.flat.take_grad()
        if unit.flat.grad_shard is None:  # one reduction for each buffer
            unit.flat.add_grad_shard(self.comm.reduce_scatter(grad))


class Hasty(bugs.Shared):
    """ZeRO-3 that keeps the tied table gathered between its two uses."""

    def pre_forward(self, unit: Unit) -> None:
        if unit.name != "lm_head":  # the table is still there
            self.gather(unit.flat)

    def post_forward(self, unit: Unit) -> None:
        if unit.name == "wte":
            self.gather(unit.flat)
        unit.flat.reshard()

    def post_backward(self, unit: Unit) -> None:
        unit.flat.reshard()
        if unit.reduces:
            unit.flat.add_grad_shard(self.comm.reduce_scatter(unit.flat.take_grad()))


class Patient(Strategy):
    """ZeRO-1, whose gradients are summed over microbatches and reduced once."""

    def post_backward(self, unit: Unit) -> None:
        if unit.reduces:
            flat = unit.flat
            flat.add_grad_whole(flat.take_grad())
            own = flat.whole_grad()[flat.own.start : flat.own.stop]
            flat.grad_shard = self.comm.reduce_scatter(flat.whole_grad(), out=own)

    def publish_params(self, flat: Flat) -> None:
        self.comm.all_gather(flat.shard(), out=flat.whole_param())


class Sparing(Strategy):
    """ZeRO-2."""

    keeps_grads = False

    def post_backward(self, unit: Unit) -> None:
        if unit.reduces:
            unit.flat.add_grad_shard(self.comm.reduce_scatter(unit.flat.take_grad()))

    def publish_params(self, flat: Flat) -> None:
        if flat.own.start < flat.numel:  # nothing but padding: spare the traffic
            self.comm.all_gather(flat.shard(), out=flat.whole_param())


def rounds(
    num_stages: int,
    stage: int,
    micro_batches: int,
    chunks: int = 1,
) -> list[Action]:
    """Return GPipe in rounds of the microbatches that may be live."""
    size = num_stages - stage // 2
    actions: list[Action] = []
    for first in range(0, micro_batches, size):
        turn = range(first, min(first + size, micro_batches))
        actions += [Forward(slot) for slot in turn]
        actions += [Backward(slot) for slot in turn]
    return actions
