"""What latent attention keeps for backward, and what a part that runs again frees of it; sinks and their ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.config import RunConfig
from zerosim.train.run import run

HIDDEN, HEADS, TOKENS, FP32 = 32, 4, 8, 4
BASE: dict[str, Any] = dict(
    layers=2, hidden=HIDDEN, heads=HEADS, vocab=256, seq=TOKENS, steps=1, ranks=1, precision="fp32", micro_batch=1,
    attention="flash", model="deepseek_v3",
)  # fmt: skip


def saved(**changes: Any) -> tuple[dict[tuple[str, str], int], RunConfig]:
    """The bytes that attention of the last block saves, by op and name."""
    config = RunConfig(**BASE | changes)
    rows = run(config).saved["layers.1"]
    return {(row.op, row.what): row.nbytes for row in rows if "attn" in row.op or row.op == "attention"}, config


def test_attention_keeps_latents_and_heads_of_two_widths() -> None:
    found, config = saved()
    q, kv, plain, turned, value = config.model.latents
    number = TOKENS * FP32
    assert found == {
        ("self_attn.q_a_proj", "input"): number * HIDDEN,  # the other first map reads it too
        ("self_attn.q_a_layernorm", "input"): number * q,
        ("self_attn.q_a_layernorm", "rstd"): number,
        ("self_attn.q_b_proj", "input"): number * q,
        ("self_attn.kv_a_layernorm", "input"): number * kv,
        ("self_attn.kv_a_layernorm", "rstd"): number,
        ("self_attn.kv_b_proj", "input"): number * kv,
        ("attention", "q, k, v"): number * HEADS * (2 * (plain + turned) + value),
        ("attention", "output"): number * HEADS * value,
        ("attention", "log-sum-exp"): number * HEADS,
    }


def test_maps_into_heads_run_again_from_latents() -> None:
    """q|k|v is not saved, and a step is the same to the bit; less is held when the loss's backward begins."""
    plain, _ = saved()
    again, _ = saved(recompute="selective:mla_up_proj")
    assert plain.keys() - again.keys() == {("attention", "q, k, v")}
    base = BASE | dict(layers=4, seq=64)
    results = [run(RunConfig(**base | dict(recompute=one))) for one in ("none", "selective:mla_up_proj", "full")]
    for other in results[1:]:
        assert all(np.array_equal(other.weights[name], values) for name, values in results[0].weights.items())
        assert sum(other.memory[0].peak.by_kind.values()) < sum(results[0].memory[0].peak.by_kind.values())


@pytest.mark.parametrize("changes", [dict(ranks=2, tp=2), dict(ranks=2, cp=2), dict(ranks=2, tp=2, cp=1, stage=3)])
def test_sinks_are_cut_with_their_heads(changes: dict[str, Any]) -> None:
    """Every rank's share of a sink's gradient comes together: as one rank to the last digits of fp64."""
    base = BASE | dict(model="gpt_oss", precision="fp64", optimizer="sgd", lr=0.5, experts_kernel="grouped")
    expected = run(RunConfig(**base)).weights
    result = run(RunConfig(**base | changes))
    assert any(name.endswith("self_attn.sinks") for name in expected)
    for name, values in expected.items():
        np.testing.assert_allclose(result.weights[name], values, rtol=0, atol=1e-12, err_msg=name)
