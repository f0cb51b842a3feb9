"""Adafactor beside torch.optim's and transformers', which are given the same gradients.

The bounds are relative to the largest weight. Both libraries square roots of sums where zerosim sums squares, and the
sums of slices are added in another order: a few units in the last place of each step. Float64 shows that nothing else
differs.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerosim.optim.adafactor import Adafactor, AdafactorHF
from zerosim.optim.control import StepControl
from zerosim.optim.factored import Factored
from zerosim.optim.lr_schedule import LRSchedule
from zerosim.optim.updater import Updater

from .test_optim import Make, inputs, run_torch, run_zerosim

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers.optimization")

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
    weights, grads = inputs(precision)
    expected, _ = run_torch(make, weights, grads, CLIP)
    largest = max(abs(value).max() for value in expected.values())
    for stage, ranks in ((0, 1), (2, 3)):
        final, _ = run_zerosim(
            lambda: Updater(ours, StepControl(schedule, clip_norm=CLIP)), precision, weights, grads, stage, ranks
        )
        error = max(abs(final[each] - expected[each]).max() for each in expected) / largest
        assert error < BOUND[precision], (stage, ranks, error)


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
def test_as_many_arrays_of_a_matrix_as_the_libraries_hold(name: str) -> None:
    ours, make, _ = CASES[name]
    weight = torch.nn.Parameter(torch.ones(40, 25))
    optimizer = make([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with _Live(weight.numel()) as live:
        optimizer.step()
    assert live.most == ours.temporaries
