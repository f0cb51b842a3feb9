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
from zerosim.errors import InputError
from zerosim.placement.families import DECODERS
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
REFUSED = "flash", "sp", "pp", "zb-h1", "lora, tp"
"""What an encoder with a decoder cannot do."""
DEALT = (
    ("stage 1", "stage 2", "offload"),
    ("lora", "qlora"),
    ("full", "parts", "module, parts"),
    ("pp", "zb-h1"),
)
"""Ways that a family's blocks change little: each family takes one of each, in turn."""
QUICK = ("gemma2",)
NAMES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CONFIGS]


@pytest.mark.parametrize("name", NAMES)
def test_every_way(name: str, tmp_path: Path) -> None:
    base = BASE | dict(model=written(name, tmp_path))
    if name.endswith("chunks"):
        base["attention"] = "flash"  # eager attention reads whole rows
    expected = run(RunConfig(**base | dict(stage=0))).weights
    turn = list(CONFIGS).index(name)
    others = {way for ways in DEALT for way in ways if way != ways[turn % len(ways)]}
    for way, changes in (SAME | OTHER).items():
        if way in others:
            continue
        if name.startswith("t5") and way in REFUSED:
            with pytest.raises(InputError, match=r"an encoder"):
                RunConfig(**base | changes)
            continue
        if way == "tiles" and RunConfig(**base).model.has_experts:
            with pytest.raises(InputError, match=r"experts"):
                RunConfig(**base | changes)
            continue
        if way == "lora, tp" and RunConfig(**base).model.kv_heads == 1:
            changes = {**changes, "lora_target": "q,k,v,o,up"}  # no adapter of a whole map with copies
        if (model := RunConfig(**base).model).has_experts and "lora_target" in changes:
            words = changes["lora_target"].replace("o,up,down", "o").replace("k,down", "k")
            if way == "lora, tp" and model.decoder.block.renames:
                words = "q,k,v,o"  # all-linear reaches the stacks, whose adapters are whole
            changes = {**changes, "lora_target": words}
        config = RunConfig(**base | changes)
        result = run(config)
        planned = plan(config, every_rank=True)
        assert [memory.peak for memory in planned.memory] == [memory.peak for memory in result.memory], way
        assert planned.traffic == result.traffic, way
        assert formulas_agree(checks(result)), way
        if way in SAME:
            apart = max(float(np.abs(result.weights[weight] - expected[weight]).max()) for weight in expected)
            assert apart <= 2e-6, way


COPIED = ["gpt_bigcode", *(pytest.param(name, marks=pytest.mark.slow) for name in ("falcon", "falcon, new", "phi3"))]


@pytest.mark.parametrize("name", COPIED)
def test_ranks_hold_copies_of_a_fused_weights_keys_and_values(name: str, tmp_path: Path) -> None:
    """With fewer heads of keys than ranks: as one rank to the last digits of fp64, clipped too, and a plan agrees."""
    base = BASE | dict(model=written(name, tmp_path), steps=2, precision="fp64", stage=0, lr=0.1, clip_norm=0.5)
    expected = run(RunConfig(**base)).weights
    for changes in (dict(), dict(stage=1), dict(stage=3, sequence_parallel=True), dict(stage=3, gather="module")):
        config = RunConfig(**base | changes | dict(ranks=8, tp=4))
        assert config.model.kv_heads < config.mesh.tp
        result, planned = run(config), plan(config)
        assert [memory.peak for memory in planned.memory] == [memory.peak for memory in result.memory]
        assert planned.traffic == result.traffic
        assert formulas_agree(checks(result))
        for weight, values in expected.items():
            np.testing.assert_allclose(result.weights[weight], values, rtol=0, atol=1e-12, err_msg=weight)


def test_an_adapter_of_a_whole_map_with_copies_is_refused(tmp_path: Path) -> None:
    model = written("gpt_bigcode", tmp_path)
    for target in ("all-linear", "c_attn", "*c_attn"):
        with pytest.raises(InputError, match=r"all columns of c_attn cannot be cut over 4 .* choose q,k,v"):
            run(RunConfig(model=model, ranks=4, tp=4, steps=1, seq=16, lora_rank=2, lora_target=target))


SIDE_BY_SIDE = [name for name, row in DECODERS.items() if row.block.parallel]


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
@pytest.mark.parametrize("target", ["all-linear", "q,up", ""])
def test_prefetch_gathers_nothing_twice_in_a_first_block_without_input_gradient(name: str, target: str) -> None:
    """Nothing below the first block is trained: backward visits its leaves in the order that it announces."""
    base: dict[str, Any] = dict(model=name, layers=2, hidden=8, heads=2, vocab=32, seq=4, ranks=2, stage=3, steps=1)
    frozen: dict[str, Any] = dict(freeze=DECODERS[name].table, tie_embeddings=False)
    trains = dict(lora_rank=2, lora_target=target) if target else frozen
    config = RunConfig(**base, gather="module", **trains)
    plain, ahead = plan(config), plan(config.replace(prefetch=2))
    assert ahead.traffic == plain.traffic
    assert formulas_agree(checks(ahead))


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_a_last_leaf_that_backward_does_not_reach_is_not_kept(name: str) -> None:
    """A pipeline's first stage with adapters in attention alone: the feed-forward beside it needs no gradient."""
    base: dict[str, Any] = dict(model=name, layers=2, hidden=8, heads=2, vocab=32, seq=4, ranks=4, pp=2, stage=3)
    more: dict[str, Any] = dict(steps=1, accumulate=2, gather="module", keep_last_unit=True, lora_rank=1)
    assert formulas_agree(checks(plan(RunConfig(**base, **more, lora_target="q,v"))))


@pytest.mark.bits
@pytest.mark.parametrize("name", NAMES)
def test_stages_are_equal_to_the_bit(name: str, tmp_path: Path) -> None:
    """Without accumulation all four are; with it 0 and 1 are, and 2 and 3."""
    base = BASE | dict(model=written(name, tmp_path), accumulate=1, precision="bf16", optimizer="adam", lr=0.1)
    base |= dict(attention="flash") if name.endswith("chunks") else {}
    weights = [run(RunConfig(**base | dict(stage=stage))).weights for stage in range(4)]
    for other in weights[1:]:
        assert all(np.array_equal(other[weight], values) for weight, values in weights[0].items())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_formula_has_as_many_parameters_as_are_declared(name: str, tmp_path: Path) -> None:
    config = RunConfig(model=written(name, tmp_path), seq=8)
    assert parameters_of(config) == build_model(config, cpu()).num_parameters


def test_the_numbers_of_files_are_not_neutral(tmp_path: Path) -> None:
    named = {name for name in CONFIGS if RunConfig(model=written(name, tmp_path), seq=8).model.numbers != NEUTRAL}
    assert {"gemma2", "gemma3_text", "granite", "cohere", "phi", "gptj", "gpt_neox", "mistral", "smollm3"} <= named
