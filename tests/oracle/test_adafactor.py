"""Adafactor beside torch.optim's and transformers', which are given the same gradients.

The bounds are relative to the largest weight. Both libraries square roots of sums where zerosim sums squares, and the
sums of slices are added in another order: a few units in the last place of each step. Float64 shows that nothing else
differs.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerosim.dtypes import bf16
from zerosim.optim.adafactor import Adafactor, AdafactorHF
from zerosim.optim.control import StepControl
from zerosim.optim.factored import Factored
from zerosim.optim.lr_schedule import LRSchedule
from zerosim.optim.rounding import Rounding
from zerosim.optim.updater import Updater
from zerosim.placement.partition import slice_of
from zerosim.placement.spec import FlatSpec, WeightSpec

from .test_optim import SHAPES as OF_ALL
from .test_optim import Make, inputs, run_torch, run_zerosim

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers.optimization")

SHAPES = {**OF_ALL, "experts": (4, 3, 5)}
"""Also a stack of experts' matrices, each of which has rows and columns of its own."""
LR, CLIP = 0.5, 60.0
BOUND = {"fp32": 1e-6, "fp64": 1e-14}


def theirs(**options: Any) -> Make:
    return lambda parameters: transformers.Adafactor(parameters, **options)


GIVEN, OWN = LRSchedule(LR), LRSchedule(1e-2)
"""The second bounds transformers' relative steps."""

CASES: dict[str, tuple[Factored, Make, LRSchedule]] = {
    "torch": (Adafactor(), lambda p: torch.optim.Adafactor(p, lr=LR), GIVEN),
    "torch-decay": (Adafactor(0.1), lambda p: torch.optim.Adafactor(p, lr=LR, weight_decay=0.1), GIVEN),
    "hf": (AdafactorHF(), theirs(), OWN),
    "hf-warmup": (AdafactorHF(), theirs(warmup_init=True), LRSchedule(1e-2, warmup=10_000)),
    "hf-lr": (AdafactorHF(relative_step=False), theirs(lr=LR, relative_step=False), GIVEN),
    "hf-trainer": (
        AdafactorHF(0.1, scale_parameter=False, relative_step=False),
        theirs(lr=LR, weight_decay=0.1, scale_parameter=False, relative_step=False),
        GIVEN,
    ),
    "hf-beta1": (AdafactorHF(0.1, beta1=0.9), theirs(beta1=0.9, weight_decay=0.1), OWN),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_twenty_steps(name: str, precision: str) -> None:
    """Some of them clipped. The rate is above t^-1/2 from step 5 on."""
    ours, make, schedule = CASES[name]
    weights, grads = inputs(precision, SHAPES)
    expected, _ = run_torch(make, weights, grads, CLIP)
    largest = max(abs(value).max() for value in expected.values())
    for stage, ranks in ((0, 1), (2, 3)):
        final, _ = run_zerosim(
            lambda: Updater(ours, StepControl(schedule, clip_norm=CLIP)), precision, weights, grads, stage, ranks
        )
        error = max(abs(final[each] - expected[each]).max() for each in expected) / largest
        assert error < BOUND[precision], (stage, ranks, error)


def in_bf16(make: Make, weights: dict[str, Any], grads: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """Final bf16 weights of a library's optimizer, as fp32, and the bytes of its states."""
    parameters = {name: torch.nn.Parameter(torch.tensor(value).bfloat16()) for name, value in weights.items()}
    optimizer = make(list(parameters.values()))
    for given in grads:
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(given[name]).bfloat16()
        optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    nbytes = sum(value.nbytes for value in kept if value.ndim)  # not the steps' number, and no RMS
    return {name: parameter.detach().float().numpy() for name, parameter in parameters.items()}, nbytes


@pytest.mark.parametrize("name", CASES)
def test_steps_without_masters(name: str) -> None:
    """transformers' weights to the bit. PyTorch rounds after each operation, some 16 times on the way to an update, by
    up to 2^-8 each time: so far may an update be off in one step, and a weight by two roundings of its own. 20 steps
    are within 8 x 2^-7 (measured: 6.5; with fp32's epsilon 145)."""
    ours, make, schedule = CASES[name]
    weights, grads = inputs("fp32", SHAPES)
    for steps in (1, 20):
        expected, nbytes = in_bf16(make, weights, grads[:steps])
        for stage, ranks in ((0, 1), (2, 3)):
            final, _ = run_zerosim(
                lambda: Updater(ours, StepControl(schedule), rounding=Rounding("nearest", 0)),
                *("bf16", weights, grads[:steps], stage, ranks),
            )
            for each, own in expected.items():
                error = abs(final[each].astype(np.float32) - own)
                size = np.maximum(abs(own), abs(weights[each]))
                first = 2 * 2.0**-8 * size + 16 * 2.0**-8 * abs(own - weights[each])
                bound = first if steps == 1 else 8 * 2.0**-7 * np.maximum(abs(own), 1.0)
                assert (error <= (bound if name.startswith("torch") else 0.0)).all(), (each, steps, stage)
    spec = FlatSpec("all", tuple(WeightSpec(each, shape) for each, shape in SHAPES.items()))
    kept = ours.arrays(spec, slice_of(spec.numel, 0, 1), bf16)
    assert sum(array.numel * array.dtype.itemsize for array in kept) == nbytes


class _Live(TorchDispatchMode):
    """The most elements of tensors as large as `numel` that were live at once, made since it began."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.most, self.storages = numel, 0, dict[int, Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.numel() == self.numel:
            storage = made.untyped_storage()
            if all(storage.data_ptr() != arg.untyped_storage().data_ptr() for arg in args if torch.is_tensor(arg)):
                self.storages[storage.data_ptr()] = torch.multiprocessing.reductions.StorageWeakRef(storage)
        live = [ref for ref in self.storages.values() if not ref.expired()]
        self.most = max(self.most, len(live))
        return made


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_many_arrays_of_a_matrix_as_the_libraries_hold(name: str, dtype: torch.dtype) -> None:
    ours, make, _ = CASES[name]
    weight = torch.nn.Parameter(torch.ones(40, 25, dtype=dtype))
    optimizer = make([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with _Live(weight.numel()) as live:
        optimizer.step()
    assert live.most == (ours.widened if dtype is torch.bfloat16 and ours.widened else ours.temporaries)
