"""Every family in every way: stages give equal weights, a plan leaves the run's record, forms agree with the count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_configs import CONFIGS, written

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.analysis.expect.closed_forms import parameters_of
from zerosim.config import RunConfig
from zerosim.config.numbers import NEUTRAL
from zerosim.tensor.tensor import cpu
from zerosim.train.build_model import build_model
from zerosim.train.plan import plan
from zerosim.train.run import run

BASE: dict[str, Any] = dict(
    steps=1, seq=16, layers=2, accumulate=2, optimizer="sgd", lr=1e-3, precision="fp32", stage=3, ranks=2, dropout=0.0
)
PARTS = "selective:layernorm,mlp,attn_proj,core_attn"
SAME: dict[str, dict[str, Any]] = {  # as stage 0, up to the order of sums
    "stage 1": dict(stage=1),
    "stage 2": dict(stage=2),
    "stage 3": dict(),
    "full": dict(recompute="full"),
    "parts": dict(recompute=PARTS),
    "flash": dict(attention="flash", saves="megatron"),
    "tp": dict(stage=1, ranks=4, tp=2, pad_vocab=True),
    "sp": dict(ranks=4, tp=2, sequence_parallel=True, recompute="full"),
    "module": dict(gather="module", prefetch=2),
    "module, parts": dict(gather="module", recompute=PARTS),
    "tiles": dict(gather="module", tiles=2),
    "pp": dict(stage=1, ranks=4, pp=2),
    "chunked": dict(loss="chunked"),
    "offload": dict(offload="optimizer=host,params=host"),
}
OTHER: dict[str, dict[str, Any]] = {
    "zb-h1": dict(stage=1, ranks=4, pp=2, pipeline="zb-h1", accumulate=4),
    "lora": dict(lora_rank=4, lora_target="q,v,o,up,down"),
    "lora, tp": dict(stage=1, ranks=4, tp=2, lora_rank=4, lora_target="all-linear"),
    "lora, module": dict(gather="module", lora_rank=4, lora_target="k,down", recompute=PARTS),
    "qlora": dict(lora_rank=4, base="nf4"),
    "bf16": dict(precision="bf16"),
}
QUICK = "gemma2", "cohere, norms"
NAMES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CONFIGS]


@pytest.mark.parametrize("name", NAMES)
def test_every_way(name: str, tmp_path: Path) -> None:
    base = BASE | dict(model=written(name, tmp_path))
    expected = run(RunConfig(**base | dict(stage=0))).weights
    for way, changes in (SAME | OTHER).items():
        if "tp" in changes and RunConfig(**base).model.kv_heads == 1:
            continue  # refused for a fused weight with one head of keys
        config = RunConfig(**base | changes)
        result = run(config)
        planned = plan(config, every_rank=True)
        assert [memory.peak for memory in planned.memory] == [memory.peak for memory in result.memory], way
        assert planned.traffic == result.traffic, way
        assert formulas_agree(checks(result)), way
        if way in SAME:
            apart = max(float(np.abs(result.weights[weight] - expected[weight]).max()) for weight in expected)
            assert apart <= 2e-6, way


@pytest.mark.bits
@pytest.mark.parametrize("name", NAMES)
def test_stages_are_equal_to_the_bit(name: str, tmp_path: Path) -> None:
    """Without accumulation all four are; with it 0 and 1 are, and 2 and 3."""
    base = BASE | dict(model=written(name, tmp_path), accumulate=1, precision="bf16", optimizer="adam", lr=0.1)
    weights = [run(RunConfig(**base | dict(stage=stage))).weights for stage in range(4)]
    for other in weights[1:]:
        assert all(np.array_equal(other[weight], values) for weight, values in weights[0].items())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_formula_has_as_many_parameters_as_are_declared(name: str, tmp_path: Path) -> None:
    config = RunConfig(model=written(name, tmp_path), seq=16)
    assert parameters_of(config) == build_model(config, cpu()).num_parameters


def test_the_numbers_of_files_are_not_neutral(tmp_path: Path) -> None:
    named = {name for name in CONFIGS if RunConfig(model=written(name, tmp_path)).model.numbers != NEUTRAL}
    assert {"gemma2", "gemma3_text", "granite", "cohere", "phi", "gptj", "gpt_neox", "mistral", "smollm3"} <= named
