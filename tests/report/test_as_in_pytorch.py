"""Where PyTorch does otherwise than zerosim, as run: a plan warns, a recipe or a page says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zerosim.cli.main import main
from zerosim.config import plan_config
from zerosim.config.presets.recipes import find_recipe
from zerosim.report.warnings import warnings_of

PAGES = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            dict(pipeline="interleaved", accumulate=9, recipe="fsdp2"),
            "refuses 9 microbatches in 2 rounds: --accumulate 8",
        ),
        (dict(pipeline="zb-h1", accumulate=9), "refuses 9 microbatches in 2 rounds: --accumulate 8"),
        (dict(pipeline="interleaved", accumulate=9, recipe="megatron", stage=1), ""),
        (dict(pipeline="interleaved", accumulate=8, recipe="fsdp2"), ""),
        (
            dict(accumulate=2, recipe="fsdp2"),
            "Schedule1F1B refuses fewer microbatches than pipeline stages: --accumulate 4",
        ),
        (dict(accumulate=2, recipe="megatron", stage=1), ""),
        (dict(pipeline="zb-v", accumulate=8, recompute="full"), "runs a checkpointed block again for each group"),
        (dict(pipeline="zb-v", accumulate=8), ""),
        (dict(accumulate=8, recompute="full", recipe="fsdp2"), ""),
        (dict(accumulate=8, recipe="fsdp2", tie_embeddings=True), "unties the token table without a word"),
        (dict(accumulate=8, recipe="megatron", stage=1, tie_embeddings=True), ""),
        (dict(pp=1, tp=2, recipe="fsdp2"), "keeps the token table's whole gradient on every rank of tp"),
        (dict(pp=1, tp=2, recipe="megatron", stage=1), ""),
    ],
    ids=str,
)
def test_a_plan_warns_of_what_pytorchs_meshes_refuse_run_again_and_keep(changes: dict[str, Any], expected: str) -> None:
    given = dict(model="gpt", layers=8, ranks=4, pp=4, tie_embeddings=False, stage=2)
    config = plan_config(**{**given, **changes})
    found = [text for text in warnings_of(config, None, None, None) if "PyTorch" in text]
    assert len(found) == bool(expected)
    assert expected in "".join(found)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("meshes.md", "unties the table without a word"),
        ("meshes.md", "every rank keeps the table's whole gradient until `zero_grad`: 12/T + 4 bytes a parameter"),
        ("meshes.md", "a checkpointed block runs forward again for each group of parameters"),
        ("context.md", "neither an error nor a warning says so"),
        ("time.md", "PyTorch's first step has one bucket with everything"),
        ("counting.md", "`exp_avg_sq` can rise but never fall"),
        ("ten_jobs.md", "DeepSpeed's ZeRO, whose wrapped optimizer makes its states in its first step too"),
    ],
)
def test_a_page_says_what_pytorch_does_otherwise(page: str, said: str) -> None:
    assert said in (PAGES / page).read_text("utf-8")


def test_ddps_first_step_is_one_bucket(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the first step has one bucket with everything" in find_recipe("ddp").approximations
    for stage, said in ((0, True), (3, False)):
        assert main(["plan", *f"--model gpt2 --ranks 8 --stage {stage} --gpu a100-80".split()]) == 0
        assert ("In PyTorch's first step one bucket has all gradients" in capsys.readouterr().out) == said


def test_a_plan_warns_that_fsdp1_reduces_frozen_parameters_of_a_unit() -> None:
    """Whose states some ranks lack."""
    for recipe, freeze, said in (("fsdp1", "*.ln_*", 1), ("fsdp2", "*.ln_*", 0), ("fsdp1", None, 0)):
        config = plan_config(model="gpt2", ranks=4, stage=3, recipe=recipe, freeze=freeze)
        assert sum("some ranks then hold no" in text for text in warnings_of(config, None, None, None)) == said


def test_a_plan_warns_that_deepspeed_reduces_every_microbatch() -> None:
    for recipe, sync, said in (("deepspeed", False, 1), ("deepspeed", True, 0), ("fsdp2", False, 0)):
        config = plan_config(model="gpt2", ranks=4, stage=2, recipe=recipe, grad_sync=sync, accumulate=2)
        assert sum("no_sync refuses" in text for text in warnings_of(config, None, None, None)) == said
