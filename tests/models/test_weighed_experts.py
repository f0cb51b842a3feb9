"""Experts whose weights multiply what is between their maps, as Megatron's: the same function, other bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.config import RunConfig
from zerosim.train.plan import plan
from zerosim.train.run import run

BASE: dict[str, Any] = dict(
    layers=1, hidden=32, heads=4, seq=16, micro_batch=2, experts=4, top_k=2, expert_ffn=24, ranks=1, stage=0, steps=3,
)  # fmt: skip
M, R, H, F = 32, 64, 32, 24


@pytest.mark.parametrize(("model", "wide", "kept"), [("gpt", F, 2 * R * F), ("llama", 2 * F, 0)])
def test_the_rows_are_kept_once_and_a_gated_function_with_its_weights(model: str, wide: int, kept: int) -> None:
    config = RunConfig(model=model, precision="bf16", recipe="megatron", saves="megatron", **BASE)
    (rows,) = [rows for unit, rows in plan(config).saved.items() if unit.endswith(".0")]
    at = [row.op for row in rows].index("dispatch") + 1  # what the experts' maps and the function between them keep
    assert sum(row.nbytes for row in rows[at:]) == 2 * R * H + 2 * R * wide + kept + 2 * R + 2 * R * F


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_the_function_is_the_same(model: str) -> None:
    after, between = (
        run(RunConfig(model=model, weigh_between=way, precision="fp32", **BASE)).losses for way in (False, True)
    )
    assert np.array(between) == pytest.approx(np.array(after), rel=1e-5)


def test_a_plan_leaves_the_record_of_a_run() -> None:
    config = RunConfig(model="llama", recipe="megatron", precision="bf16", **BASE | dict(steps=1))
    real, planned = run(config, keep_events=True), plan(config, keep_events=True)
    assert planned.events[0] == real.events[0]


def test_the_recipe_is_of_models_without_experts_too() -> None:
    assert RunConfig(model="flat", recipe="megatron").experts.weigh_between
