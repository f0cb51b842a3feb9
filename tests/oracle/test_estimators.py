"""The frameworks' estimators beside their own functions: the same integers for a dozen sizes, by all arguments."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from zerosim.analysis import formulas

DRAW = random.Random(0)
SIZES = [
    (total := DRAW.randint(1, 10 ** DRAW.randint(3, 13)), DRAW.randint(0, total), DRAW.randint(1, 16), nodes)
    for nodes in (1, 1, 1, 1, 2, 3, 5, 7, 16, 61, 128, 1024)
]
"""(parameters, those of the largest layer, GPUs of a node, nodes)"""
BOTH = (False, True)


@pytest.fixture(scope="module")
def estimators() -> tuple[Any, Any]:
    """DeepSpeed's functions of stages 2 and 3."""
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as third
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as second

    return second, third


@pytest.mark.parametrize(("total", "largest", "gpus", "nodes"), SIZES)
def test_deepspeeds(total: int, largest: int, gpus: int, nodes: int, estimators: tuple[Any, Any]) -> None:
    second, third = estimators
    for factor, offload in itertools.product((1.5, 1.0, 1.3), BOTH):
        given: dict[str, Any] = {"cpu_offload": offload, "additional_buffer_factor": factor}
        assert formulas.deepspeed_stage_2(total, gpus, nodes, **given) == second(total, gpus, nodes, **given)
        for params, init in itertools.product(BOTH, BOTH):
            more = {**given, "cpu_offload_params": params, "zero_init": init}
            *theirs, layer = third(total, largest, gpus, nodes, **more)
            assert formulas.deepspeed_stage_3(total, largest, gpus, nodes, **more) == tuple(theirs)
            assert layer == 4 * largest


def test_defaults_are_deepspeeds(estimators: tuple[Any, Any]) -> None:
    second, third = estimators
    assert formulas.deepspeed_stage_2(10**9) == second(10**9)
    assert formulas.deepspeed_stage_3(10**9, 10**8) == third(10**9, 10**8)[:2]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8", "int8", "int4"])
def test_accelerates(dtype: str) -> None:
    estimate = pytest.importorskip("accelerate.commands.estimate")
    for total, *_ in SIZES:
        assert formulas.accelerate_training(4 * total, dtype) == estimate.estimate_training_usage(4 * total, dtype)
        odd = 4 * total + 1
        assert formulas.accelerate_training(odd, dtype) == estimate.estimate_training_usage(odd, dtype)
