"""From what a student hands in to strategies and schedules that a run can use.

A function of an exercise on strategies is put into one that does the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from zerosim.comm.collectives import Comm
from zerosim.config import RunConfig
from zerosim.device.device import Buffer, Device
from zerosim.errors import InputError
from zerosim.grading.exercise import Check
from zerosim.grading.limits import Failure, Watch, called
from zerosim.grading.own_code import text_of
from zerosim.grading.trial import Own
from zerosim.models.model import Model
from zerosim.nn import Unit
from zerosim.optim.updater import Updater
from zerosim.parallel.base import Strategy
from zerosim.parallel.tensor import Borders, TensorParallel
from zerosim.parallel.zero3 import Zero3
from zerosim.tensor.flat import Flat, Slice, slice_of, whole
from zerosim.train.build import build_strategy

SLICES = ((12, 4), (10, 4), (7, 3), (3, 4), (1, 1), (5, 8))
"""(numel, N) that slice bounds are asked for: dividing, not dividing, more ranks than elements."""


def strategy(answer: Any) -> Own:
    """Strategies of the class handed in. Raises: InputError for anything else."""
    if not (inspect.isclass(answer) and issubclass(answer, Strategy)):
        raise InputError(f"{name_of(answer)} is no strategy: hand in the class itself, such as class Mine(Strategy)")
    made: type[Strategy] = answer

    def make(config: RunConfig, model: Model, comm: Comm, device: Device, updater: Updater) -> Strategy:
        return made(comm, device, updater)

    return Own(strategy=make)


def borders(answer: Any) -> Own:
    """The run's own strategy, over layers with the f and g handed in. Raises: InputError for anything else."""
    if not (inspect.isclass(answer) and issubclass(answer, Borders)):
        raise InputError(f"{name_of(answer)} has no f and g: hand in the class itself, such as class Mine(Borders)")
    made: type[Borders] = answer

    def make(config: RunConfig, model: Model, comm: Comm, device: Device, updater: Updater) -> Strategy:
        assert isinstance(model.group, TensorParallel)  # by the exercise's cases
        model.group.borders = made()
        return build_strategy(config, model, comm, device, updater)

    return Own(strategy=make)


def schedule(answer: Any) -> Own:
    """A pipeline's schedule. Raises: InputError for anything but a function."""
    return Own(schedule=function_of(answer, "schedule(num_stages, stage, micro_batches, chunks)"))


def bounds(answer: Any) -> Own:
    """ZeRO-3 over the slices of the function handed in. Raises: InputError for anything but a function."""
    cut = function_of(answer, "slice_of(numel, rank, world_size)")

    class Bounds(Zero3):
        def owned(self, flat: Flat) -> Slice:
            start, stop = cut(flat.numel, self.comm.rank, self.comm.size)
            return Slice(start, stop, flat.numel)

    return strategy(Bounds)


def reduction(answer: Any) -> Own:
    """DDP whose gradients go through the function handed in. Raises: InputError for anything but a function."""
    reduce = function_of(answer, "all_reduce(comm, grad)")

    class Reduction(Strategy):
        sees_all_grads = True

        def owned(self, flat: Flat) -> Slice:
            return whole(flat.numel)

        def post_backward(self, unit: Unit) -> None:
            if unit.reduces:
                flat = unit.flat
                flat.add_grad_whole(flat.take_grad())
                _in_place(reduce, self.comm, flat.whole_grad())
                flat.grad_shard = flat.whole_grad()

    return strategy(Reduction)


def _in_place(reduce: Callable[..., Any], comm: Comm, grad: Buffer) -> None:
    """Call it. Raises: InputError where all of a gradient is as it was, or its mean was returned and is not in it."""
    before = _values(grad)
    returned = reduce(comm, grad)
    after = _values(grad)
    if before.any() and np.array_equal(before, after):
        gave = "" if returned is None else f" a {type(returned).__name__}"
        raise InputError(f"grad is as it was when all_reduce returned{gave}")
    is_whole = isinstance(returned, Buffer) and returned is not grad and returned.numel == grad.numel
    if is_whole and not np.array_equal(_values(returned), after):
        raise InputError("grad is not what all_reduce returned")


def _values(buffer: Buffer) -> Any:
    return np.array(buffer.device.backend.to_host(buffer.array))


def examine_bounds(answer: Any, watch: Watch) -> tuple[Check, ...] | Failure:
    """The slices of some sizes, compared with N slices of ceil(numel / N)."""
    cut = function_of(answer, "slice_of(numel, rank, world_size)")
    asked = ""

    def first_wrong() -> tuple[str, str] | None:
        nonlocal asked
        for numel, ranks in SLICES:
            for rank in range(ranks):
                asked = f"slice_of({numel}, {rank}, {ranks})"
                wrong = _wrong_bounds(cut(numel, rank, ranks), slice_of(numel, rank, ranks))
                if wrong is not None:
                    return wrong
        return None

    wrong, failure = called(first_wrong, watch, lambda: asked)
    if failure is not None and failure.reason == "unsolved":
        return failure
    expected = "N slices of ceil(numel / N) elements, one after the other"
    if failure is not None:
        hint = "" if failure.reason == "error" else _LOOP
        return (Check("slices", False, expected, f"{asked} {failure.text}", line=failure.line, hint=hint),)
    if wrong is not None:
        counted, hint = wrong
        return (Check("slices", False, expected, f"{asked} {counted}", hint=hint),)
    return (Check("slices", True, expected, f"{len(SLICES)} sizes, every rank"),)


def _wrong_bounds(came: Any, right: Slice) -> tuple[str, str] | None:
    """What is wrong, and a hint. Compared on the thread of the call: even `==` may be the student's own."""
    if isinstance(came, tuple) and came == (right.start, right.stop):
        return None
    hint = _ROUND if isinstance(came, tuple) else "return a pair: return start, stop"
    return f"is {text_of(came, repr)}, expected {(right.start, right.stop)}", hint


_LOOP = "a loop without an end, or a sleep: no loop is needed, a slice's start and stop are two products"
_ROUND = "round up, -(-numel // world_size): one length for all; what reaches past numel is padding"


def function_of(answer: Any, signature: str) -> Callable[..., Any]:
    if inspect.isclass(answer) or not callable(answer):
        raise InputError(f"{name_of(answer)} is no function: hand in {signature}")
    function: Callable[..., Any] = answer
    return function


def name_of(answer: Any) -> str:
    return text_of(answer, lambda one: getattr(one, "__name__", None) or f"a {type(one).__name__}")


def examined(
    name: str, expected: str, all_of_it: str, came: tuple[Any, Failure | None], asked: Callable[[], str]
) -> tuple[Check, ...] | Failure:
    """The check of an answer by itself, of `all_of_it`; `came` is what is wrong and a hint, or None, as `called` gave
    it, and `asked` what was asked last."""
    wrong, failure = came
    if failure is not None and failure.reason == "unsolved":
        return failure
    if failure is not None:
        return (Check(name, False, expected, f"{asked()} {failure.text}", line=failure.line),)
    if wrong is not None:
        return (Check(name, False, expected, wrong[0], hint=wrong[1]),)
    return (Check(name, True, expected, all_of_it),)
