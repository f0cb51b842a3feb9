"""Experts whose weights multiply what is between their maps, as Megatron's: the same function, other bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.analysis.expect.closed_forms import parameters_of
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.tensor.tensor import cpu
from zerosim.train.build_model import build_model
from zerosim.train.plan import plan
from zerosim.train.run import run

BASE: dict[str, Any] = dict(
    layers=1, hidden=32, heads=4, seq=16, micro_batch=2, experts=4, top_k=2, expert_ffn=24, ranks=1, stage=0, steps=3,
)  # fmt: skip
M, R, H, F = 32, 64, 32, 24


@pytest.mark.parametrize(
    ("model", "recompute", "kept"),
    [
        ("gpt", "none", F + F + F),
        ("llama", "none", 2 * F + F),
        ("gpt", "selective:mlp_act", F),
        ("llama", "selective:mlp_act", 2 * F),
    ],
)
def test_the_rows_are_kept_once_and_what_the_function_read(model: str, recompute: str, kept: int) -> None:
    config = RunConfig(model=model, precision="bf16", recipe="megatron", saves="megatron", recompute=recompute, **BASE)
    (rows,) = [rows for unit, rows in plan(config).saved.items() if unit.endswith(".0")]
    at = [row.op for row in rows].index("dispatch") + 1  # what the experts' maps and the function between them keep
    assert sum(row.nbytes for row in rows[at:]) == 2 * R * (H + kept + 1)  # and a weight of each row


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_the_function_is_the_same(model: str) -> None:
    after, between = (
        run(RunConfig(model=model, weigh_between=way, precision="fp32", **BASE)).losses for way in (False, True)
    )
    assert np.array(between) == pytest.approx(np.array(after), rel=1e-5)


def test_results_are_kept_in_the_dtype_that_weighs_them() -> None:
    """A token's rows and their weights."""
    for weighed, nbytes in ((None, 2), ("fp32", 4)):
        config = RunConfig(model="llama", precision="bf16", weigh_dtype=weighed, **BASE)
        (rows,) = [rows for unit, rows in plan(config).saved.items() if unit.endswith(".0")]
        assert sum(row.nbytes for row in rows if row.op == "weigh") == nbytes * R * (H + 1)


def test_a_plan_leaves_the_record_of_a_run() -> None:
    config = RunConfig(
        model="llama", recipe="megatron", precision="bf16", recompute="selective:mlp_act", **BASE | dict(steps=1)
    )
    real, planned = run(config, keep_events=True), plan(config, keep_events=True)
    assert planned.events[0] == real.events[0]


def test_the_recipe_is_of_models_without_experts_too() -> None:
    assert RunConfig(model="flat", recipe="megatron").experts.weigh_between


def test_shared_experts_have_a_width_of_their_own() -> None:
    sizes = dict(layers=2, hidden=32, heads=4, seq=16, experts=4, top_k=2, expert_ffn=24, shared_experts=1)
    narrow, whole = (RunConfig(model="llama", **sizes, **more) for more in ({"shared_ffn": 12}, {}))
    counted = [build_model(config, cpu()).num_parameters for config in (narrow, whole)]
    assert counted == [parameters_of(narrow), parameters_of(whole)]
    assert counted[1] - counted[0] == 2 * 3 * 32 * 12
    with pytest.raises(InputError, match="shared_ffn 12: expected a gpt or llama with shared experts"):
        RunConfig(model="mixtral", shared_ffn=12)
