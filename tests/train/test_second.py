"""An encoder with a decoder: two texts of two lengths, cross-attention, a trained bias of scores; what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.train.data import shift_right
from zerosim.train.plan import plan
from zerosim.train.run import run

SIZES: dict[str, Any] = dict(layers=2, hidden=16, heads=4, seq=20, decoder_seq_length=13, vocab=256)


def config(**changes: Any) -> RunConfig:
    rows = dict(ranks=1, micro_batch=4, accumulate=1, steps=2, precision="fp32", optimizer="sgd", lr=0.1)
    return RunConfig(model="t5", **{**SIZES, **rows, **changes})


def test_the_decoder_reads_what_it_predicted_before() -> None:
    batch = np.arange(14).reshape(2, 7)
    assert np.array_equal(shift_right(batch, 4, 99)[0], [0, 1, 2, 3, 99, 4, 5, 4, 5, 6])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_no_division_of_the_batch_or_the_model_changes_the_result(dropout: float) -> None:
    """Dropout's masks belong to microbatches, so these stay as they are."""
    alone = run(config(ranks=1, micro_batch=2, accumulate=2, dropout=dropout))
    ways: list[dict[str, Any]] = [
        dict(ranks=2, stage=3),
        dict(accumulate=2, stage=1, recompute="full"),
        dict(ranks=2, stage=2, recompute="selective:layernorm,attn_proj,mlp,core_attn"),
        dict(ranks=2, stage=3, gather="module"),
        dict(ranks=2, tp=2, accumulate=2),
        dict(ranks=4, tp=2, stage=1, recompute="full", saves="megatron"),
    ]
    for way in ways:
        other = run(config(micro_batch=2, dropout=dropout, **way))
        assert np.allclose(other.mean_losses, alone.mean_losses, rtol=0, atol=1e-6), way
        for name, values in alone.weights.items():
            assert np.abs(other.weights[name] - values).max() <= 2e-6, (way, name)


@pytest.mark.parametrize(
    "way",
    [
        dict(stage=3),
        dict(stage=1, tp=2),
        dict(stage=2, tp=2, recompute="full"),
        dict(stage=3, tp=2, recompute="selective:attn_proj"),
        dict(stage=3, gather="module", recompute="full"),
        dict(stage=3, lora_rank=2, lora_target="q,o", recompute="full"),
        dict(stage=3, gather="module", lora_rank=2, lora_target="v", recompute="selective:layernorm,attn_proj"),
        dict(stage=3, freeze="encoder.*"),
        dict(stage=3, freeze="shared.*,encoder.*", recompute="full"),
        dict(stage=3, freeze="shared.*,decoder.*", gather="module"),
        dict(stage=3, freeze="shared.*,*_bias.*"),
        dict(stage=2, precision="bf16", fp32_softmax=True, saves="megatron", loss="chunked"),
    ],
    ids=str,
)
def test_a_plan_is_the_run_and_formulas_agree(way: dict[str, Any]) -> None:
    asked = config(ranks=4, micro_batch=1, accumulate=2, dropout=0.1, **{"optimizer": "adam", **way})
    result = run(asked)
    for planned in (plan(asked.replace(steps=2)), plan(asked.replace(steps=2), every_block=True)):
        for rank, memory in enumerate(result.memory):
            there = planned.memory[planned.stands_for[rank]]
            assert (memory.peak, memory.marks) == (there.peak, there.marks)
        assert planned.traffic[0] == result.traffic[0]
    assert formulas_agree(checks(result))


def test_blocks_repeat_what_one_did_event_by_event() -> None:
    asked = config(ranks=2, stage=3, recompute="full:2", layers=4)
    one, every = (plan(asked, keep_events=True, every_block=alone) for alone in (False, True))
    assert one.events[0] == every.events[0]


def test_the_bias_is_one_table_for_all_blocks_of_a_stack() -> None:
    names = [name for name in run(config(steps=1)).weights if "relative_attention_bias" in name]
    assert names == [
        f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for stack in ("encoder", "decoder")
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(ranks=2, pp=2, accumulate=2), r"^pp 2: an encoder \(t5\) is trained on one pipeline stage only"),
        (dict(sample="ZeRO"), r"^sample 'ZeRO': an encoder with a decoder \(t5\) continues no text yet"),
        (dict(attention="flash"), r"^attention 'flash': .*trains a bias of its scores, .*choose eager"),
        (dict(optimizer="sophia"), r"^optimizer 'sophia': .*choose adam"),
        (dict(ranks=2, tp=2, sequence_parallel=True), r"^sequence_parallel: .*rows of two lengths; leave it out"),
        (dict(ranks=2, tp=2, lora_rank=2), r"^tp 2: .*with frozen weights is not modelled; choose tp 1"),
        (dict(recompute="full", cpu_checkpointing=True), r"^cpu_checkpointing: .*leave it out"),
        (dict(decoder_seq_length=0), r"^decoder_seq_length 0: expected at least 1"),
    ],
)
def test_what_it_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config(**changes)


def test_a_text_needs_both_lengths() -> None:
    with pytest.raises(InputError, match=r"one row needs seq \+ decoder_seq_length = 60013 bytes"):
        run(config(seq=60000))


def test_a_decoder_alone_has_one_length() -> None:
    with pytest.raises(InputError, match=r"^decoder_seq_length 5: model gpt has one length, --seq"):
        RunConfig(decoder_seq_length=5)
    assert config(decoder_seq_length=None).model.decoder_seq_length == SIZES["seq"]
