"""Eager attention whose softmax is kept in fp32, as without a fused kernel: bytes, and no other bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.analysis.capabilities.recompute import block_form
from zerosim.analysis.formulas import block_parts, total
from zerosim.analysis.weights import sizes
from zerosim.config import RunConfig, plan_config
from zerosim.errors import InputError
from zerosim.train.plan import plan
from zerosim.train.run import run

GPT: dict[str, Any] = dict(model="gpt", layers=2, hidden=64, heads=4, seq=64, vocab=256, ranks=2, stage=1)


def softmax_bytes(**fields: Any) -> dict[str, int]:
    result = plan(plan_config(**GPT, **fields))
    return {row.what: row.nbytes for row in result.saved["h.0"] if row.op == "attention" and "q, k" not in row.what}


def test_bytes_of_a_score() -> None:
    scores = 4 * 64 * 64
    assert softmax_bytes(dropout=0.1, fp32_softmax=True) == {
        "fp32 softmax": 4 * scores,
        "mask": scores,
        "dropped softmax": 2 * scores,
    }
    assert softmax_bytes(dropout=0.0, fp32_softmax=True) == {"softmax": 2 * scores, "fp32 softmax": 4 * scores}
    assert softmax_bytes(dropout=0.1, fp32_softmax=True, saves="lean") == {"fp32 softmax": 4 * scores, "mask": scores}
    assert softmax_bytes(dropout=0.0, fp32_softmax=True, precision="fp32") == {"softmax": 4 * scores}


@pytest.mark.parametrize("tp", [1, 2])
def test_a_block_keeps_what_the_form_says(tp: int) -> None:
    """The published 34 sbh + 5 as²b with 7 in place of 5; zerosim's statistics of norms come on top, in both alike."""

    def kept(*, wide: bool) -> tuple[int, int]:
        config = plan_config(**GPT, tp=tp, dropout=0.1, recipe="megatron", transformer_engine=not wide)
        return sum(row.nbytes for row in plan(config).saved["h.0"]), int(block_form(config).at(sizes(config)))

    (counted, form), (fused, published) = kept(wide=True), kept(wide=False)
    assert counted - fused == form - published == 2 * 4 * 64 * 64 // tp


def test_the_parts_of_a_block_add_up() -> None:
    config = plan_config(**GPT, fp32_softmax=True)
    assert total(block_parts(fp32_softmax=True).values()).at(sizes(config)) == block_form(config).at(sizes(config))


@pytest.mark.quick(1)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("saves", ["lean", "megatron"])
def test_no_bit_depends_on_it(dropout: float, saves: str) -> None:
    fields = {**GPT, "dropout": dropout, "saves": saves, "steps": 2, "seq": 16}
    wide, half = (run(RunConfig(**fields, fp32_softmax=on)) for on in (True, False))
    assert wide.losses == half.losses
    for name, value in wide.weights.items():
        np.testing.assert_array_equal(value, half.weights[name])


def test_recipe_megatron_has_it_without_transformer_engine() -> None:
    def of(**fields: Any) -> RunConfig:
        return RunConfig(**GPT, recipe="megatron", **fields)

    assert not of().memory.fp32_softmax
    assert of(transformer_engine=False).memory.fp32_softmax
    assert not of(transformer_engine=False, fp32_softmax=False).memory.fp32_softmax
    assert "fp32_softmax" in of(transformer_engine=False, attention="flash").set_aside
    with pytest.raises(InputError, match="not with attention 'flash'"):
        RunConfig(**GPT, attention="flash", fp32_softmax=True)
