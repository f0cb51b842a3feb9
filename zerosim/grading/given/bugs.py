"""Strategies, and a schedule, with one bug each, to be found from the grader's report and repaired.

There is one ZeRO-3, `Shared`; the other two are differences from it, which a student also reads as whole classes
(`source_of`). Nothing here names the bugs: the repaired classes are in notebooks/solutions.
"""

from __future__ import annotations

import inspect
from typing import Any

from zerosim.device.device import Buffer
from zerosim.nn import Unit
from zerosim.parallel.base import Strategy
from zerosim.parallel.schedule import Action, Backward, Forward
from zerosim.tensor.flat import Flat, Slice


class Shared(Strategy):
    """ZeRO-3 on a model whose head is its token table."""

    keeps_params = False
    keeps_grads = False

    def gather(self, flat: Flat) -> None:
        flat.unshard(self.comm.all_gather(flat.shard()))

    def pre_forward(self, unit: Unit) -> None:
        self.gather(unit.flat)

    def post_forward(self, unit: Unit) -> None:
        unit.flat.reshard()

    def pre_backward(self, unit: Unit) -> None:
        self.gather(unit.flat)

    def post_backward(self, unit: Unit) -> None:
        unit.flat.reshard()
        unit.flat.add_grad_shard(self.comm.reduce_scatter(unit.flat.take_grad()))


class Thrifty(Shared):
    """ZeRO-3."""

    def gather(self, flat: Flat) -> None:
        self.full = self.comm.all_gather(flat.shard())
        flat.unshard(self.full)


class Hasty(Shared):
    """ZeRO-3 that keeps the tied table gathered between its two uses."""

    def pre_forward(self, unit: Unit) -> None:
        if unit.name != "lm_head":  # the table is still there
            self.gather(unit.flat)

    def post_forward(self, unit: Unit) -> None:
        if unit.name != "wte":
            unit.flat.reshard()

    def pre_backward(self, unit: Unit) -> None:
        if unit.name != "lm_head":  # forward has just used it
            self.gather(unit.flat)

    def post_backward(self, unit: Unit) -> None:
        unit.flat.reshard()
        if unit.reduces:
            unit.flat.add_grad_shard(self.comm.reduce_scatter(unit.flat.take_grad()))


class Mean(Strategy):
    """DDP."""

    sees_all_grads = True

    def owned(self, flat: Flat) -> Slice:
        return Slice(0, flat.numel, flat.numel)

    def padded(self, flat: Flat) -> int:
        return flat.numel

    def mean(self, grad: Buffer) -> None:
        self.comm.all_reduce(grad)
        self.device.kernel(grad.numel, self.device.backend.divide, grad.array, float(self.comm.size), grad.array)

    def post_backward(self, unit: Unit) -> None:
        if unit.reduces:
            unit.flat.add_grad_whole(unit.flat.take_grad())
            if self.last:
                self.mean(unit.flat.whole_grad())
                unit.flat.grad_shard = unit.flat.grad_whole


class Patient(Strategy):
    """ZeRO-1, whose gradients are summed over microbatches and reduced once."""

    def post_backward(self, unit: Unit) -> None:
        if unit.reduces:
            flat, grad = unit.flat, unit.flat.take_grad()
            if flat.grad_whole is None or not self.last:
                flat.add_grad_whole(grad)
            if self.last:
                own = flat.whole_grad()[flat.own.start : flat.own.stop]
                flat.grad_shard = self.comm.reduce_scatter(flat.whole_grad(), out=own)

    def publish_params(self, flat: Flat) -> None:
        self.comm.all_gather(flat.shard(), out=flat.whole_param())


class Sparing(Strategy):
    """ZeRO-2."""

    keeps_grads = False

    def post_backward(self, unit: Unit) -> None:
        if unit.reduces:
            flat, grad = unit.flat, unit.flat.take_grad()
            if flat.own.start >= flat.numel:
                flat.add_grad_shard(flat.new_grad_shard())  # nothing but padding: spare the traffic
            else:
                flat.add_grad_shard(self.comm.reduce_scatter(grad))

    def publish_params(self, flat: Flat) -> None:
        self.comm.all_gather(flat.shard(), out=flat.whole_param())


def rounds(
    num_stages: int,
    stage: int,
    micro_batches: int,
    chunks: int = 1,
) -> list[Action]:
    """Return GPipe in rounds of the microbatches that may be live."""
    size = num_stages - stage
    actions: list[Action] = []
    for first in range(0, micro_batches, size):
        turn = range(first, min(first + size, micro_batches))
        actions += [Forward(slot) for slot in turn]
        actions += [Backward(slot) for slot in turn]
    return actions


def source_of(given: Any) -> str:
    """Return the source of a class or function; for a difference from `Shared`, that of one whole class like
    `Shared`."""
    if not (inspect.isclass(given) and Shared in given.__bases__):
        return inspect.getsource(given)
    source = inspect.getsource(Shared).replace("class Shared(", f"class {given.__name__}(")
    source = source.replace(f'"""{Shared.__doc__}"""', f'"""{given.__doc__}"""')
    for name, method in vars(given).items():
        if inspect.isfunction(method):
            source = source.replace(inspect.getsource(vars(Shared)[name]), inspect.getsource(method))
    return source
