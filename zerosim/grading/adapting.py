"""Adapters that turn a student's answer into strategies and schedules for a run.

An exercise's function on strategies is placed into a strategy that does the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from zerosim.comm.collectives import Comm
from zerosim.config import RunConfig
from zerosim.device.device import Buffer, Device
from zerosim.errors import InputError
from zerosim.grading.own_code import text_of
from zerosim.grading.plain import plain, shown
from zerosim.grading.trial import Own
from zerosim.models.model import Model
from zerosim.nn import Unit
from zerosim.optim.updater import Updater
from zerosim.parallel.base import Strategy
from zerosim.parallel.tensor import Borders, TensorParallel
from zerosim.parallel.zero3 import Zero3
from zerosim.tensor.flat import Flat, Slice, whole
from zerosim.train.build_strategy import build_strategy

T = TypeVar("T")


def strategy(answer: Any) -> Own:
    """Return strategies of the given class. Raises: InputError for anything else."""
    made = class_of(answer, Strategy, "is not a strategy")

    def make(config: RunConfig, model: Model, comm: Comm, device: Device, updater: Updater) -> Strategy:
        return made(comm, device, updater)

    return Own(strategy=make)


def borders(answer: Any) -> Own:
    """Return the run's own strategy, over layers with the given f and g. Raises: InputError for anything else."""
    made = class_of(answer, Borders, "has no f and g")

    def make(config: RunConfig, model: Model, comm: Comm, device: Device, updater: Updater) -> Strategy:
        assert isinstance(model.group.maps, TensorParallel)  # by the exercise's cases
        model.group.maps.borders = made()
        return build_strategy(config, model, comm, device, updater)

    return Own(strategy=make)


def schedule(answer: Any) -> Own:
    """Return a pipeline's schedule. Raises: InputError for anything but a function."""
    return Own(schedule=function_of(answer, "schedule(num_stages, stage, micro_batches, chunks)"))


def bounds(answer: Any) -> Own:
    """Return ZeRO-3 over the slices of the given function. Raises: InputError for anything but a function."""
    cut = function_of(answer, "slice_of(numel, rank, world_size)")

    class Bounds(Zero3):
        def owned(self, flat: Flat) -> Slice:
            asked = flat.numel, self.comm.rank, self.comm.size
            came = plain(cut(*asked))
            if not is_pair(came):
                raise InputError(f"slice_of{asked} is {shown(came)}, not a pair of whole numbers")
            return Slice(came[0], came[1], flat.numel)

    return strategy(Bounds)


def reduction(answer: Any) -> Own:
    """Return DDP whose gradients go through the given function. Raises: InputError for anything but a function."""
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


def is_pair(came: Any) -> bool:
    return isinstance(came, tuple) and len(came) == 2 and all(type(bound) is int for bound in came)


def _in_place(reduce: Callable[..., Any], comm: Comm, grad: Buffer) -> None:
    """Call it. Raises: InputError if a gradient is unchanged, or its mean was returned and not written into it."""
    before = _values(grad)
    returned = reduce(comm, grad)
    after = _values(grad)
    if before.any() and np.array_equal(before, after):
        gave = "" if returned is None else f" a {type(returned).__name__}"
        raise InputError(f"grad was unchanged when all_reduce returned{gave}")
    is_whole = isinstance(returned, Buffer) and returned is not grad and returned.numel == grad.numel
    if is_whole and not np.array_equal(_values(returned), after):
        raise InputError("grad is not what all_reduce returned")


def _values(buffer: Buffer) -> Any:
    return np.array(buffer.device.backend.to_host(buffer.array))


def function_of(answer: Any, signature: str) -> Callable[..., Any]:
    if inspect.isclass(answer) or not callable(answer):
        raise InputError(f"{name_of(answer)} is not a function: hand in {signature}")
    function: Callable[..., Any] = answer
    return function


def only_asked(given: Callable[..., Any]) -> Callable[[Any], Own]:
    """Make an `adapt` for answers that no run uses. It raises InputError for anything but a function."""

    def adapt(answer: Any) -> Own:
        function_of(answer, f"{given.__name__}({', '.join(inspect.signature(given).parameters)})")
        return Own()

    return adapt


def class_of(answer: Any, base: type[T], lacks: str) -> type[T]:
    """Return the class handed in. Raises: InputError for anything but a subclass of `base`, naming what it lacks."""
    if not (inspect.isclass(answer) and issubclass(answer, base)):
        such = f"class Mine({base.__name__})"
        raise InputError(f"{name_of(answer)} {lacks}: hand in the class itself, such as {such}")
    return answer


def name_of(answer: Any) -> str:
    return text_of(answer, lambda one: getattr(one, "__name__", None) or f"a {type(one).__name__}")
