"""Keys and values repeated to all heads, or returned by recomputed blocks: the same values, and transformers' bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.train.plan import plan
from zerosim.train.run import run

SIZES: dict[str, Any] = dict(
    model="llama", layers=2, hidden=32, heads=4, kv_heads=2, seq=8, vocab=256, micro_batch=2, steps=2
)


def test_repeated_heads_compute_the_same() -> None:
    """Losses to the bit, and weights within rounding: the copies' gradients are added in another order."""
    config = RunConfig(**SIZES, ranks=2, stage=3, precision="fp64", optimizer="sgd")
    one, other = run(config), run(config.replace(repeat_kv=True))
    assert one.losses[0] == other.losses[0]
    for name, values in one.weights.items():
        np.testing.assert_allclose(other.weights[name], values, rtol=0, atol=1e-14, err_msg=name)
    assert plan(config.replace(repeat_kv=True)).memory[0].to_dict() == other.memory[0].to_dict()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_block_keeps_2h_heads_of_keys_and_values_in_place_of_2k(tp: int) -> None:
    config = RunConfig(**SIZES, ranks=tp, tp=tp, attention="flash", saves="foak")
    kept = (sum(row.nbytes for row in plan(one).saved["layers.1"]) for one in (config, config.replace(repeat_kv=True)))
    grouped, repeated = kept
    assert repeated - grouped == 2 * (4 - 2) * 8 * 2 * 2 * 8 // tp


def test_repeated_heads_are_refused_where_none_is_shared() -> None:
    with pytest.raises(InputError, match="repeat_kv: the model has as many heads"):
        RunConfig(**SIZES | dict(kv_heads=4), ranks=1, repeat_kv=True)


CACHED: dict[str, Any] = SIZES | dict(model="gpt_bigcode", kv_heads=1, layers=3, vocab=2048, recompute="full")


@pytest.mark.parametrize("stage", [0, 3])
def test_returned_keys_and_values_live_until_the_loss_is_there(stage: int) -> None:
    """Of a fused map the whole result of every block, 2 (H + 2K) d bytes a token. They change no bit."""
    config = RunConfig(**CACHED | dict(seq=16, lora_rank=2), ranks=2, stage=stage, attention="flash", loss="hf-half")
    plain, kept = run(config), run(config.replace(use_cache=True))
    assert kept.losses == plain.losses
    assert all((kept.weights[name] == values).all() for name, values in plain.weights.items())
    one, other = plain.memory[0], kept.memory[0]
    assert other.peak.total_bytes - one.peak.total_bytes == 3 * 2 * (32 + 2 * 8) * 2 * 16
    assert other.marks == one.marks
    assert plan(config.replace(use_cache=True)).memory[0].to_dict() == other.to_dict()
