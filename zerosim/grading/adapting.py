"""From what a student hands in to strategies that a run can use, and checks of functions by themselves.

Owns the two exercises whose answer is a function: it is put into a strategy that does the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from zerosim.comm.collectives import Comm
from zerosim.device import Device
from zerosim.errors import InputError
from zerosim.grading.exercise import Check
from zerosim.grading.source import line_of_trace
from zerosim.grading.trial import Make
from zerosim.models.model import Model
from zerosim.nn import Unit
from zerosim.optim.updater import Updater
from zerosim.parallel.base import Strategy
from zerosim.parallel.zero3 import Zero3
from zerosim.scenario import RunConfig
from zerosim.sharding import Flat, Slice, slice_of, whole

SLICES = ((12, 4), (10, 4), (7, 3), (3, 4), (1, 1), (5, 8))
"""(numel, N) that slice bounds are asked for: dividing, not dividing, more ranks than elements."""


def strategy(answer: Any) -> Make:
    """Strategies of the class handed in. Raises: InputError for anything else."""
    if not (inspect.isclass(answer) and issubclass(answer, Strategy)):
        raise InputError(f"{_name(answer)} is no strategy: hand in the class itself, such as class Mine(Strategy)")
    made: type[Strategy] = answer

    def make(config: RunConfig, model: Model, comm: Comm, device: Device, updater: Updater) -> Strategy:
        return made(comm, device, updater)

    return make


def bounds(answer: Any) -> Make:
    """ZeRO-3 over the slices of the function handed in. Raises: InputError for anything but a function."""
    cut = _function(answer, "slice_of(numel, rank, world_size)")

    class Bounds(Zero3):
        def owned(self, flat: Flat) -> Slice:
            start, stop = cut(flat.numel, self.comm.rank, self.comm.size)
            return Slice(start, stop, flat.numel)

    return strategy(Bounds)


def reduction(answer: Any) -> Make:
    """DDP whose gradients go through the function handed in. Raises: InputError for anything but a function."""
    reduce = _function(answer, "all_reduce(comm, grad)")

    class Reduction(Strategy):
        agrees_alone = True

        def owned(self, flat: Flat) -> Slice:
            return whole(flat.numel)

        def post_backward(self, unit: Unit) -> None:
            if unit.reduces:
                flat = unit.flat
                flat.add_grad_whole(flat.take_grad())
                reduce(self.comm, flat.whole_grad())
                flat.grad_shard = flat.whole_grad()

    return strategy(Reduction)


def examine_bounds(answer: Any) -> list[Check]:
    """The slices of some sizes, compared with N slices of ceil(numel / N)."""
    cut = _function(answer, "slice_of(numel, rank, world_size)")
    expected = "N slices of ceil(numel / N) elements, one after the other"
    for numel, ranks in SLICES:
        for rank in range(ranks):
            right = slice_of(numel, rank, ranks)
            try:
                found = cut(numel, rank, ranks)
            except NotImplementedError:
                raise
            except Exception as error:
                counted = f"slice_of({numel}, {rank}, {ranks}) raised {type(error).__name__}: {error}"
                return [Check("slices", False, expected, counted, line=line_of_trace(error.__traceback__), hint=_ROUND)]
            if found != (right.start, right.stop):
                counted = f"slice_of({numel}, {rank}, {ranks}) is {found!r}, expected {(right.start, right.stop)}"
                return [Check("slices", False, expected, counted, hint=_ROUND)]
    return [Check("slices", True, expected, f"{len(SLICES)} sizes, every rank")]


_ROUND = "round up, -(-numel // world_size): one length for all; what reaches past numel is padding"


def _function(answer: Any, signature: str) -> Callable[..., Any]:
    if inspect.isclass(answer) or not callable(answer):
        raise InputError(f"{_name(answer)} is no function: hand in {signature}")
    function: Callable[..., Any] = answer
    return function


def _name(answer: Any) -> str:
    return getattr(answer, "__name__", None) or f"a {type(answer).__name__}"
