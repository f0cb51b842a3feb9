"""Outputs that the caller keeps until the next forward returns: logits, keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.train.plan import plan
from zerosim.train.run import run

LAYERS, T, ROWS, KV, V = 3, 8, 2, 16, 128
CONFIG = RunConfig(
    model="llama", layers=LAYERS, hidden=32, heads=4, kv_heads=2, seq=T, vocab=V, micro_batch=ROWS, ranks=2, stage=0,
    recipe="ddp", precision="bf16", saves="eager", steps=2, loss="hf-5-kept",
)  # fmt: skip
RETURNS = CONFIG.replace(use_cache=True)


@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_between_steps_logits_and_all_keys_and_values_stay(attention: str) -> None:
    one, other = (run(config.replace(attention=attention)) for config in (CONFIG, RETURNS))
    assert all(np.array_equal(other.weights[name], one.weights[name]) for name in one.weights)
    held = [found.memory[0].marks["after_step"].total_bytes for found in (one, other)]
    assert held[1] - held[0] == ROWS * T * (2 * V + LAYERS * 2 * 2 * KV)
    assert plan(RETURNS.replace(attention=attention)).memory[0].to_dict() == other.memory[0].to_dict()


def test_a_forward_that_has_returned_frees_the_last_ones_outputs() -> None:
    """They die with its loss, which the model computes."""
    one, other = (plan(config).memory[0].marks["end_of_forward"].total_bytes for config in (CONFIG, RETURNS))
    assert other == one


@pytest.mark.parametrize(
    ("more", "said"),
    [({"loss": "hf-5"}, "nobody keeps them"), ({"tp": 2}, "tp and pp")],
)
def test_models_that_return_none_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        RETURNS.replace(**more)
