"""Transformer Engine's dummy gradients: one for each shape of weight, for the whole run, and no bit depends on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.config import RunConfig, plan_config
from zerosim.errors import InputError
from zerosim.train.plan import plan
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(layers=2, hidden=64, heads=4, seq=16, vocab=256, ranks=2, stage=1, steps=2, accumulate=2)
MARK = "after_step"


def dummies(**fields: Any) -> int:
    result = plan(plan_config(**{**SMALL, "recipe": "megatron", "steps": 1, **fields}))
    assert result.live_bytes_after == [0] * len(result.memory)
    return result.memory[0].marks[MARK].by_unit.get(("dummy gradients", "temp"), 0)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_block_of_gpt_leaves_one_of_each_shape(layers: int) -> None:
    h = 64
    assert dummies(model="gpt", layers=layers) == 2 * (3 * h * h + h * h + 4 * h * h + 4 * h * h)
    assert dummies(model="gpt", layers=layers, precision="fp32") == 4 * 12 * h * h


def test_equal_shapes_share_one() -> None:
    """At tp 4 both maps of the feed-forward are h x h; the table and the head have none that stays."""
    h = 64
    assert dummies(model="gpt", ranks=4, tp=4) == 2 * (3 * h * h // 4 + h * h // 4 + h * h)


def test_packed_maps_of_llama_are_one_weight() -> None:
    h, f, narrow = 64, 160, 32
    sizes = dict(model="llama", ffn=f, kv_heads=2)
    assert dummies(**sizes) == 2 * ((h + 2 * narrow) * h + h * h + 2 * f * h + h * f)
    assert dummies(**sizes, ranks=2, tp=2) == ((h + 2 * narrow) * h + h * h + 2 * f * h + h * f)


def test_without_fusion_or_transformer_engine_there_are_none() -> None:
    assert dummies(model="gpt", gradient_accumulation_fusion=False) == 0
    assert dummies(model="gpt", transformer_engine=False) == 0
    assert dummies(model="gpt", stage=2) == 0


@pytest.mark.parametrize("more", [{}, {"pp": 2, "accumulate": 4}, {"recompute": "full"}, {"precision": "fp16"}])
def test_the_first_step_holds_as_much_as_the_second(more: dict[str, Any]) -> None:
    fields = {**SMALL, "model": "gpt", "recipe": "megatron", "accumulate": 1, **more}
    one, two = (plan(plan_config(**{**fields, "steps": steps})).memory for steps in (1, 2))
    assert [rank.peak.by_kind for rank in one] == [rank.peak.by_kind for rank in two]


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("more", [{}, {"stage": 0, "pp": 2, "pipeline": "zb-h1"}, {"tp": 2, "precision": "fp16"}])
def test_no_bit_depends_on_them(model: str, more: dict[str, Any]) -> None:
    """Keys and values of one shape lie side by side in one dummy."""
    fields = {**SMALL, "model": model, "recipe": "megatron", **more}
    with_them, without = (run(RunConfig(**fields, gradient_accumulation_fusion=on)) for on in (True, False))
    assert with_them.losses == without.losses
    for name, value in with_them.weights.items():
        np.testing.assert_array_equal(value, without.weights[name])
    assert with_them.live_bytes_after == [0, 0]


def test_nothing_to_fuse_with_is_refused() -> None:
    with pytest.raises(InputError, match="it has no effect without persistent_grads"):
        RunConfig(**SMALL, model="gpt", gradient_accumulation_fusion=True)
    with pytest.raises(InputError, match="it has no effect without transformer_engine"):
        RunConfig(**SMALL, model="gpt", recipe="megatron", gradient_accumulation_fusion=True, transformer_engine=False)
