"""Adapters that FSDP leaves alone: every rank has all of them, and of their gradients and states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.train.plan import plan
from zerosim.train.run import run

CUT = RunConfig(
    model="llama", layers=2, hidden=32, heads=4, kv_heads=2, seq=8, vocab=128, ranks=3, recipe="fsdp1", steps=2,
    precision="bf16-pure", adapter_dtype="bf16", lora_rank=4,
)  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"base": "nf4"},
        {"accumulate": 2},
        {"precision": "bf16", "adapter_dtype": "fp32"},
        {"gather": "module"},
        {"ranks": 4, "cp": 2},
    ],
    ids=str,
)
def test_whole_adapters_train_as_adapters_that_are_cut(more: dict[str, Any]) -> None:
    """To the bit, and the count is the closed form's: 2 Psi_t for weights, for gradients, and 4 Psi_t for moments."""
    one, other = (run(CUT.replace(**more, adapter_shards=shards)) for shards in ("unit", "whole"))
    assert all(np.array_equal(other.weights[name], one.weights[name]) for name in one.weights)
    assert formulas_agree(checks(other))
    assert plan(other.config).memory[0].to_dict() == other.memory[0].to_dict()


def test_every_rank_holds_8_bytes_a_parameter() -> None:
    found = plan(CUT.replace(adapter_shards="whole"))
    held, trained = found.memory[2].marks["end_of_backward"].by_kind, 2 * 4 * (32 + 32 + 32 + 16)
    assert (held["grad"], held["optim"]) == (2 * trained, 4 * trained)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"recipe": "fsdp2"}, "choose recipe fsdp1 at stage 3"),
        ({"precision": "bf16", "adapter_dtype": None}, "choose recipe fsdp1 at stage 3 and adapter_dtype fp32"),
        ({"ranks": 4, "dp_replicate": 2}, "leave out tp, pp, dp_replicate"),
    ],
)
def test_other_adapters_are_cut(more: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        CUT.replace(adapter_shards="whole", **more)
