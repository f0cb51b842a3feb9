"""Encoders: masked tokens drawn by their place in the global batch, a loss of these alone, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from built import builder, place

from zerosim.config import RunConfig
from zerosim.dtypes import fp64
from zerosim.errors import InputError
from zerosim.functional.labels import predicted
from zerosim.models.decoder import build_decoder
from zerosim.tensor.tensor import Tensor, cpu
from zerosim.train.masked import UNREAD, mask_tokens
from zerosim.train.run import run
from zerosim.train.uploads import upload

SIZES: dict[str, Any] = dict(layers=2, hidden=16, heads=4, seq=20, vocab=256)
FAMILIES = "bert", "roberta"


def config(family: str = "bert", **changes: Any) -> RunConfig:
    rows = dict(ranks=1, micro_batch=4, accumulate=1, steps=2, precision="fp32", lr=1e-2)
    return RunConfig(model=family, **{**SIZES, **rows, **changes})


def test_each_row_has_as_many_predicted_tokens() -> None:
    rows = np.random.default_rng(0).integers(0, 200, (50, 40))
    inputs, targets = np.split(mask_tokens(rows, 1, 2, 256, 255), 2, axis=1)
    chosen = targets != UNREAD
    assert (chosen.sum(axis=1) == predicted(40)).all()
    assert predicted(40) == 6
    assert predicted(1) == 1
    assert np.array_equal(targets[chosen], rows[chosen])
    assert np.array_equal(inputs[~chosen], rows[~chosen])
    masked, kept = (inputs[chosen] == 255).mean(), (inputs[chosen] == rows[chosen]).mean()
    assert 0.7 < masked < 0.9
    assert 0.05 < kept < 0.18
    assert 0.03 < 1 - masked - kept < 0.18
    other = mask_tokens(rows, 1, 3, 256, 255)
    assert not np.array_equal(other[:, 40:], targets)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_division_of_the_batch_or_the_model_changes_the_result(family: str) -> None:
    """With SGD: a key's bias has no gradient but rounding, which Adam would scale up."""
    sgd: dict[str, Any] = dict(optimizer="sgd", lr=0.1)
    alone = run(config(family, **sgd))
    ways: list[dict[str, Any]] = [
        dict(ranks=2, micro_batch=2, stage=3),
        dict(ranks=2, micro_batch=1, accumulate=2, stage=1, recompute="full"),
        dict(ranks=4, micro_batch=1, stage=2, recompute="selective:layernorm,attn_proj,mlp"),
        dict(ranks=4, micro_batch=1, stage=3, gather="module"),
        dict(ranks=2, tp=2),
        dict(ranks=2, tp=2, sequence_parallel=True, stage=0),
    ]
    for way in ways:
        other = run(config(family, **sgd, **way))
        assert np.allclose(other.mean_losses, alone.mean_losses, rtol=0, atol=1e-6), way
        for name, values in alone.weights.items():
            assert np.abs(other.weights[name] - values).max() <= 1e-6, (way, name)


@pytest.mark.parametrize("freeze", ["*,!bias", "*.bias", "*embeddings.*"])
def test_a_table_and_its_heads_bias_are_trained_apart(freeze: str) -> None:
    """They lie in one buffer, and share no gradient."""
    changes: dict[str, Any] = dict(freeze=freeze, optimizer="sgd", lr=0.1, steps=1, ranks=2, micro_batch=2, stage=3)
    whole, part = run(config(**changes | {"freeze": None})), run(config(**changes))
    start = run(config(**changes | {"lr": 1e-30})).weights
    table, bias = "bert.embeddings.word_embeddings.weight", "lm_head.bias"
    for name, is_frozen in ((table, freeze != "*.bias"), (bias, freeze == "*.bias")):
        expected = start[name] if is_frozen else whole.weights[name]
        assert np.abs(part.weights[name] - expected).max() <= 1e-6, name
        assert np.abs(whole.weights[name] - start[name]).max() > 1e-4, name


@pytest.mark.parametrize("loss", ["in-place", "lean", "megatron", "megatron-fused", "torch", "torch-kept", "chunked"])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_mode_leaves_out_tokens_that_are_not_predicted(loss: str, tp: int) -> None:
    sgd: dict[str, Any] = dict(optimizer="sgd", lr=0.1, steps=1)
    one, other = run(config(**sgd)), run(config(loss=loss, ranks=tp, tp=tp, **sgd))
    assert one.mean_losses == pytest.approx(other.mean_losses, abs=1e-6)
    for name, values in one.weights.items():
        assert np.abs(other.weights[name] - values).max() <= 1e-6, name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_reads_all_others(family: str) -> None:
    model = place(build_decoder(builder(cpu(), fp64, name=family)))
    ids = np.array([[3, 4, 5, 6, 7, 8]])

    def logits(ids: Any) -> Any:
        x = Tensor(upload(ids, model.flats[0].device))
        for unit in model.units:
            x = unit.forward(x)
        return np.array(x.buffer.array)

    one, other = logits(ids), logits(np.array([[3, 4, 5, 6, 7, 9]]))
    assert np.abs(one - other).max(axis=2).min() > 0


def test_a_tied_head_has_the_familys_bias() -> None:
    shapes = build_decoder(builder(cpu(), name="phi", tie_embeddings=True)).shapes()
    assert shapes["lm_head.bias"] == (11,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(ranks=2, pp=2, accumulate=2), r"^pp 2: an encoder \(bert\) is trained on one pipeline stage only"),
        (dict(sample="ZeRO"), r"^sample 'ZeRO': an encoder \(bert\) fills in masked tokens, and continues no text"),
        (dict(optimizer="sophia"), r"^optimizer 'sophia': draws a label for every token, and an encoder \(bert\)"),
        (dict(tie_embeddings=False), r"^tie_embeddings: the head of an encoder \(bert\) is its token table"),
    ],
)
def test_what_an_encoder_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config(**changes)
