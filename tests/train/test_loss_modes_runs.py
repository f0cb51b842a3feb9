"""The loss modes in runs: the same training to the bit, on every mesh; other peaks, the same on shapes alone."""

from __future__ import annotations

from typing import Any

import pytest
from test_shapes import assert_same_record, small

from zerosim.config import RunConfig
from zerosim.config.parts.memory import LOSSES
from zerosim.functional.liger_loss import LIGER
from zerosim.functional.loss_modes import CHUNKED, MODES
from zerosim.train.plan import plan
from zerosim.train.run import run

MESHES: dict[str, dict[str, Any]] = {
    "ZeRO-3 in fp16": dict(ranks=3, stage=3, precision="fp16", tie_embeddings=False),
    "tp": dict(ranks=2, tp=2, stage=0, vocab=300, pad_vocab=True),
    "sequence parallel": dict(ranks=4, tp=2, stage=1, sequence_parallel=True, seq=8, precision="fp32"),
    "GPipe": dict(ranks=4, pp=2, stage=2, pipeline="gpipe", accumulate=3),
}


def test_the_choices_are_the_modes() -> None:
    assert set(LOSSES) == {*MODES, CHUNKED, *LIGER}


@pytest.mark.quick(2)
@pytest.mark.parametrize("loss", [CHUNKED, *LIGER])
@pytest.mark.parametrize("mesh", MESHES)
def test_chunks_add_in_another_order(mesh: str, loss: str) -> None:
    settings = {**MESHES[mesh], "precision": "fp64", "optimizer": "sgd"}
    lean, chunked = run(small(**settings)), run(small(**settings, loss=loss))
    assert chunked.losses[0] == pytest.approx(lean.losses[0], rel=1e-14)
    for name in lean.weights:
        assert abs(chunked.weights[name] - lean.weights[name]).max() < 1e-14, name


@pytest.mark.quick(2)
@pytest.mark.parametrize("mode", LOSSES)
def test_shapes_leave_the_record_of_a_real_run(mode: str) -> None:
    assert_same_record(small(loss=mode, ranks=2, stage=3, precision="fp16", steps=1))
    assert_same_record(small(loss=mode, ranks=4, tp=2, pp=2, stage=1, accumulate=2, pipeline="gpipe", steps=1))


def test_the_peak_of_a_large_vocabulary_is_the_table_of_the_modes() -> None:
    """Where logits are what counts: bytes of a logit at the peak, over those of the cheapest mode."""
    sizes: dict[str, Any] = dict(layers=1, hidden=8, heads=1, seq=64, vocab=50_000, ranks=1, stage=0)
    logits, peaks = 64 * 50_000, {}
    for mode in LOSSES:
        peaks[mode] = plan(RunConfig(**sizes, micro_batch=1, loss=mode)).memory[0].peak.total_bytes
    each = {mode: round((peak - peaks["in-place"]) / logits) for mode, peak in peaks.items()}
    assert each == {
        "in-place": 0,
        "lean": 2,
        "megatron": 4,
        "megatron-fused": 4,
        "megatron-compiled": 8,
        "torch": 10,
        "torch-kept": 12,
        "torch-fp32-kept": 14,
        "torch-half": 4,
        "torch-half-kept": 6,
        "hf-4.45": 10,
        "hf-4.45-kept": 14,
        "hf-4.48": 10,  # one row makes no copy
        "hf-4.48-kept": 12,
        "hf-5": 10,
        "hf-5-kept": 12,
        "hf-half": 4,
        "hf-half-autocast": 10,
        "unsloth-half": 2,
        "unsloth-half-autocast": 4,
        "unsloth-4.45": 6,
        "unsloth-4.48": 6,
        "torchtune": 4,  # 6.5 and less what the head's gradient takes later
        "litgpt": 14,  # of one chunk
        "chunked": -1,  # see below
        "liger": -2,
        "liger-fp32": -1,
        "liger-foak": -2,
    }
    an_eighth = 2 * logits // 8  # of the logits; here that is a gradient of the head's, too, of which there are two
    assert -0.01 < (peaks["chunked"] - peaks["in-place"] + 2 * logits - 2 * an_eighth) / logits < 0.01


def test_more_than_one_row_makes_a_shifted_copy() -> None:
    sizes: dict[str, Any] = dict(layers=1, hidden=8, heads=1, vocab=50_000, ranks=1, stage=0, loss="hf-4.48")
    one, two = (
        plan(RunConfig(**sizes, seq=64 // rows, micro_batch=rows)).memory[0].peak.total_bytes for rows in (1, 2)
    )
    assert round((two - one) / (64 * 50_000)) == 2  # forward's 14 bytes a logit, backward's 12


def test_two_exchanges_where_megatrons_fused_kernels_make_them() -> None:
    def calls(mode: str) -> tuple[int, int]:
        rows = plan(small(ranks=2, tp=2, stage=0, vocab=256, loss=mode, steps=1)).traffic[0]
        loss = [row for row in rows if row.axis == "tp" and row.purpose == "activations" and row.dtype == "fp32"]
        return sum(row.calls for row in loss), sum(row.sent_bytes for row in loss)

    (calls_of_three, sent), (calls_of_two, as_much) = calls("megatron"), calls("megatron-compiled")
    assert (calls_of_three, calls_of_two) == (3, 2)
    assert sent == as_much
    assert calls("megatron-fused") == (calls_of_two, as_much)
