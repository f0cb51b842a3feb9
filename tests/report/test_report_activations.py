"""The table of a block's activations: the count, the paper's form where its premises hold, words where they do not."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from zerosim.analysis.blocks import block_unit, check_block, other_premises
from zerosim.analysis.formulas import block_activations
from zerosim.comm.runtime import Context, World, launch
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.ledger.activations import ActivationLedger, SavedRow
from zerosim.models.model import draw_flat
from zerosim.report.activations import activations_table
from zerosim.train import data, engine
from zerosim.train.build import build_rank, place_rank
from zerosim.train.build_updater import build_updater

PAPER: dict[str, Any] = dict(layers=2, hidden=32, heads=4, seq=16, micro_batch=2, dropout=0.1, saves="megatron")
SIZES = {"s": 16, "b": 2, "h": 32, "a": 4, "f": 128, "t": 1}


def one_step(config: RunConfig) -> ActivationLedger:
    ledger = ActivationLedger()

    def program(ctx: Context) -> None:
        model, strategy, _ = build_rank(ctx, config, build_updater(config, 1))
        place_rank(ctx, model, strategy, lambda flat, group: draw_flat(flat, 0, group, exact_master=False))
        batch = np.random.default_rng(0).integers(0, config.model.vocab, (config.global_batch, config.model.seq + 1))
        for _ in engine.train(model, iter([data.micro_batches(batch, 0, 1, 1)]), strategy, ctx.device):
            pass

    launch(program, World(1), lambda _: (ledger,))
    return ledger


def printed(config: RunConfig, width: int = 100, encoding: str = "utf-8") -> str:
    ledger = one_step(config)
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=stream, width=width).print(activations_table(config, ledger.saved(), ledger.saved_again()))
    stream.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "selective:layernorm,mlp_act", "selective:op"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_count_and_formula_agree_under_the_papers_premises(recompute: str, precision: str) -> None:
    config = RunConfig(ranks=1, stage=0, recompute=recompute, precision=precision, **PAPER)
    saved = one_step(config).saved()
    check = check_block(config, saved["h.0"])
    assert check.formula == block_activations(recompute).at(SIZES) == check.counted[0]
    assert check.agrees
    assert not other_premises(config)
    assert check_block(config, saved["h.1"]).counted == check.counted
    assert not check_block(config, [*saved["h.1"], SavedRow("x", "input", 1)]).agrees


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"precision": "fp32"}, "an element takes 4 bytes, not 2"),
        ({"dropout": 0.0}, "without dropout there are no masks and no second softmax"),
        ({"saves": "lean"}, "--saves lean keeps the norms' statistics and no second softmax"),
        ({"ffn": 96}, "the feed-forward is 96 wide, not 4h = 128"),
        ({"attention": "flash"}, "flash attention keeps no scores"),
        ({"recompute": "selective", "dropout": 0.0}, "because without dropout there are no masks."),
        ({"recompute": "full", "precision": "fp32"}, "counts 2sbh. This is another count"),
    ],
)
def test_elsewhere_it_is_another_count_and_says_why(change: dict[str, Any], words: str) -> None:
    config = RunConfig(ranks=1, stage=0, **{**PAPER, **change})
    check = check_block(config, one_step(config).saved()["h.0"])
    assert check.formula is None
    assert not check.agrees
    shown = " ".join(printed(config).split())
    assert words in shown
    assert "agree" not in shown


def test_full_recompute_needs_a_half_type_only() -> None:
    config = RunConfig(ranks=1, stage=0, **{**PAPER, "recompute": "full", "saves": "lean", "dropout": 0.0})
    check = check_block(config, one_step(config).saved()["h.0"])
    assert check.agrees
    assert check.counted == (2 * 16 * 2 * 32,)
    assert "Backward makes" in printed(config)


def test_every_second_block_is_named() -> None:
    config = RunConfig(ranks=1, stage=0, **{**PAPER, "recompute": "full:2"})
    saved = one_step(config).saved()
    assert check_block(config, saved["h.0"], "h.0").formula == block_activations().at(SIZES) != 2 * 16 * 2 * 32
    assert check_block(config, saved["h.1"], "h.1").agrees
    shown = " ".join(printed(config).split())
    assert "Of h.1 the input alone is kept. Backward makes" in shown


@pytest.mark.quick(2)
@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("change", [{}, {"saves": "lean"}, {"attention": "flash"}, {"seq": 64, "micro_batch": 64}])
def test_it_fits_the_width_and_loses_no_number(width: int, change: dict[str, Any]) -> None:
    config = RunConfig(ranks=1, stage=0, **{**PAPER, **change})
    lines = printed(config, width).splitlines()
    assert max(map(len, lines)) <= width
    for row in one_step(config).saved()["h.0"]:
        assert any(f"{row.nbytes:,}" in line and row.op in line for line in lines), row


def test_sums_are_written_in_the_papers_units() -> None:
    lines = printed(RunConfig(ranks=1, stage=0, **PAPER)).splitlines()
    (total,) = [line for line in lines if line.startswith("one block")]
    assert total.split(maxsplit=2)[2].split(maxsplit=1)[1].strip() == "34sbh + 5as²b"
    (mark,) = [line for line in lines if line.startswith("agree")]
    assert "✓" in mark
    ascii_lines = printed(RunConfig(ranks=1, stage=0, **PAPER), encoding="ascii").splitlines()
    assert any("34sbh + 5as^2b" in line for line in ascii_lines)


def test_a_model_without_blocks_is_told_so() -> None:
    with pytest.raises(InputError, match="no block's activations, only those of: wte, head"):
        block_unit({"wte": (), "head": ()})
