"""Models with experts: a plan leaves a run's record, the sizes that say them, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.analysis.expect.closed_forms import active_of, parameters_of
from zerosim.comm.runtime import make_backend
from zerosim.config import RunConfig
from zerosim.config.huggingface.read import model_of
from zerosim.device.device import Device
from zerosim.device.events import Alloc, Kernel
from zerosim.errors import InputError
from zerosim.models.adapters import merged
from zerosim.nn.halves import kind_of
from zerosim.placement.block import Role
from zerosim.tensor.tensor import cpu
from zerosim.train.build_model import build_model
from zerosim.train.plan import plan
from zerosim.train.run import run

BASE: dict[str, Any] = dict(
    model="llama", layers=2, hidden=32, heads=4, seq=16, experts=5, top_k=2, expert_ffn=24, shared_experts=1, steps=2,
    ranks=2, accumulate=2, stage=1, precision="fp32", optimizer="sgd", lr=1e-2,
)  # fmt: skip
PARTS = "selective:layernorm,mlp"
WAYS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": dict(stage=stage) for stage in range(4)},
    "gpt": dict(model="gpt", stage=3, precision="bf16", dropout=0.1),
    "full": dict(stage=3, recompute="full"),
    "parts": dict(stage=3, recompute="selective:layernorm,mlp,attn_proj"),
    "module": dict(stage=3, gather="module", recompute="selective:layernorm,mlp"),
    "tp": dict(ranks=4, tp=2),
    "sp": dict(ranks=4, tp=2, sequence_parallel=True),
    "sp, module": dict(stage=3, ranks=4, tp=2, sequence_parallel=True, gather="module"),
    "sp, module, parts": dict(stage=3, ranks=4, tp=2, sequence_parallel=True, gather="module", recompute=PARTS),
    "tp, module, parts": dict(stage=3, ranks=4, tp=2, gather="module", recompute=PARTS),
    "sp, parts": dict(ranks=4, tp=2, sequence_parallel=True, recompute=PARTS, lora_rank=2, lora_target="q"),
    "cp": dict(stage=3, ranks=4, cp=2),
    "pp": dict(ranks=4, pp=2, accumulate=4),
    "zb-h1": dict(ranks=4, pp=2, accumulate=4, pipeline="zb-h1"),
    "zb-v": dict(ranks=4, pp=2, accumulate=4, pipeline="zb-v", layers=4),
    "fp32 router": dict(precision="bf16", router_dtype="fp32"),
    "frozen": dict(freeze="*experts*", ranks=4, tp=2, sequence_parallel=True),
    "lora": dict(lora_rank=2, lora_target="q,down"),
    "lora of experts": dict(lora_rank=2, lora_target="experts,q", stage=3),
    "lora of experts, module": dict(lora_rank=2, lora_target="experts.down_proj", stage=3, gather="module"),
    "lora of experts, gpt": dict(model="gpt", lora_rank=2, lora_target="experts", recompute="full"),
    "muon": dict(stage=2, optimizer="muon"),
    "even": dict(routing="even"),
    "losses": dict(stage=2, aux_loss=0.1, z_loss=0.01, precision="bf16"),
    "losses, tp": dict(ranks=4, tp=2, sequence_parallel=True, aux_loss=0.1, aux_loss_over="sequence", recompute="full"),
    "biases": dict(stage=3, bias_rate=0.01, recompute="full"),
    "biases, pp": dict(ranks=4, pp=2, accumulate=4, bias_rate=0.01, pipeline="zb-h1"),
    "biases, hsdp": dict(stage=3, ranks=4, dp_replicate=2, bias_rate=0.01),
    "eager": dict(stage=3, experts_kernel="eager"),
    "batched": dict(ranks=4, tp=2, sequence_parallel=True, experts_kernel="batched"),
    "autocast": dict(autocast="bf16", experts_kernel="eager"),
    "padded": dict(stage=3, capacity_factor=0.8, pad_to_capacity=True),
    "capacity": dict(stage=3, capacity_factor=1.25, routing="even"),
}
QUICK = "stage 3", "gpt", "sp", "zb-h1"


@pytest.mark.parametrize("way", [w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in WAYS])
def test_a_plan_leaves_the_record_of_a_run(way: str) -> None:
    config = RunConfig(**BASE | WAYS[way])
    real, planned = run(config, keep_events=True), plan(config, every_rank=True, keep_events=True)
    for rank in range(config.mesh.ranks):
        assert planned.events[rank] == real.events[rank]
        assert planned.memory[rank] == real.memory[rank]
    assert formulas_agree(checks(real))
    assert set(real.live_bytes_after) == {0}


@pytest.mark.parametrize("experts", [8, 64])
def test_implementations_differ_in_what_they_hold_and_in_no_bit(experts: int) -> None:
    """Beside the gradients, one stack of each map, eager's backward holds two more of the larger map and one expert's;
    a batched product keeps a matrix for each row."""
    few: dict[str, Any] = BASE | dict(layers=1, ranks=1, accumulate=1, steps=1, experts=experts, shared_experts=0)
    runs = {kernel: run(RunConfig(**few, experts_kernel=kernel)) for kernel in ("grouped", "eager", "batched")}
    sizes, temp = runs["grouped"].config.model, dict[str, int]()
    larger, rows = 2 * sizes.hidden * sizes.expert_ffn * 4, few["seq"] * RunConfig(**few).data.micro_batch * sizes.top_k
    for kernel, result in runs.items():
        found = plan(result.config, keep_events=True).events[0]
        temp[kernel] = sum({event.id: event.nbytes for event in found if isinstance(event, Alloc)
                            and event.kind == "temp" and event.nbytes >= larger}.values())  # fmt: skip
        assert result.losses == runs["grouped"].losses
        assert all((result.weights[name] == values).all() for name, values in runs["grouped"].weights.items())
    smaller = larger // 2
    assert temp["eager"] - temp["grouped"] == 2 * experts * (larger + smaller) + larger
    assert temp["batched"] - temp["grouped"] == rows * (larger + smaller)
    kept = [sum(row.nbytes for rows_of in result.saved.values() for row in rows_of) for result in runs.values()]
    assert kept[2] - kept[0] == rows * (larger + smaller)


def test_grouped_experts_of_fp32_weights_stay_fp32_under_autocast() -> None:
    """torch's grouped product is on none of autocast's lists; the other implementations' products are."""
    few: dict[str, Any] = BASE | dict(ranks=1, accumulate=1, steps=1, autocast="bf16")
    read = dict[str, int]()
    for kernel in ("grouped", "eager"):
        found = plan(RunConfig(**few, experts_kernel=kernel), keep_events=True).events[0]
        read[kernel] = next(
            event.bytes_written for event in found if isinstance(event, Kernel) and event.name == "grouped"
        )
    assert read["grouped"] == 2 * read["eager"]


def test_experts_flags_make_gpt_and_llama_mixtures() -> None:
    for model, maps in (("gpt", 2), ("llama", 3)):
        config = RunConfig(model=model, experts=8, top_k=2)
        total, sizes = build_model(config, cpu()).num_parameters, config.model
        assert total == parameters_of(config)
        assert total - active_of(sizes) == sizes.layers * 6 * maps * sizes.hidden * sizes.ffn
    dense = RunConfig(model="llama", layers=2)
    assert active_of(dense.model) == parameters_of(dense) == build_model(dense, cpu()).num_parameters


COUNTS = {
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
    "mixtral-8x22b": (140_630_071_296, 39_161_468_928),
    "qwen2-57b-a14b": (57_408_658_944, 14_249_270_784),
    "qwen1.5-moe-a2.7b": (14_315_784_192, 2_689_173_504),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
    "olmoe-1b-7b": (6_919_161_856, 1_282_017_280),
    "ernie-4.5-21b-a3b": (21_825_436_160, 3_352_148_480),
    "ernie-4.5-300b-a47b": (299_484_160_000, 47_926_583_296),
    "hunyuan-a13b": (80_393_183_232, 12_747_448_320),
    "granite-3.0-3b-a800m": (3_298_793_472, 882_874_368),
    "glm-4.5": (352_797_814_784, 33_632_251_904),
    "glm-4.5-air": (106_852_245_504, 13_424_123_904),
}
"""All parameters, and those that work for a token, as transformers' modules have them."""


@pytest.mark.parametrize("name", COUNTS)
def test_released_models_have_their_parameters_and_active_ones(name: str) -> None:
    config = RunConfig(model=name)
    total = build_model(config, Device(0, make_backend("meta"))).num_parameters
    assert (total, active_of(config.model)) == COUNTS[name]
    assert parameters_of(config) == total


def test_flops_of_a_step_are_those_of_active_parameters() -> None:
    """In forward 2 for each active matrix element and token; a norm and the looked-up table have none."""
    config = RunConfig(**BASE | dict(ranks=1, accumulate=1, steps=1, micro_batch=1))
    planned, sizes = plan(config, keep_events=True), config.model
    found = sum(
        event.flops for event in planned.events[0] if isinstance(event, Kernel) and event.name in ("linear", "grouped")
    )
    norms = (2 * sizes.layers + 1) * sizes.hidden
    assert found == 2 * sizes.seq * (active_of(sizes) - norms - sizes.vocab * sizes.hidden)


@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_merged_adapters_of_experts_compute_the_same(model: str, tmp_path: Path) -> None:
    tokens = np.random.default_rng(2).integers(0, 256, (1, 4, 17)).repeat(2, axis=0)
    np.savez(tmp_path / "equal.npz", tokens=tokens)
    few: dict[str, Any] = BASE | dict(
        model=model, ranks=1, accumulate=1, micro_batch=4, tokens=str(tmp_path / "equal.npz")
    )
    adapted = RunConfig(**few, lora_rank=3, lora_alpha=9.0, lora_target="experts,q").replace(lr=1.0)
    both = run(adapted)
    assert abs(both.losses[1][0] - both.losses[0][0]) > 1e-4
    np.savez(tmp_path / "merged.npz", **merged(run(adapted.replace(steps=1)).weights, adapted))
    plain = run(RunConfig(**few | dict(weights=str(tmp_path / "merged.npz"), steps=1)))
    assert plain.losses[0][0] == pytest.approx(both.losses[1][0], abs=2e-6)


TARGETS: dict[str, tuple[str, str, dict[str, int]]] = {
    "no words are renamed": ("llama", "all-linear", {}),
    "PEFT's word": ("mixtral", "all-linear", {"gate": 2, "experts.gate_up_proj": 16, "experts.down_proj": 8}),
    "names of modules": ("mixtral", "all", {}),
    "names that shared experts have": ("deepseek_v3", "all", {"experts.gate_up_proj": 16, "experts.down_proj": 8}),
    "an expert's words": ("qwen3_moe", "down", {"experts.down_proj": 8}),
    "a name": ("deepseek_v3", "shared_experts.down_proj", {"shared_experts.down_proj": 2}),
    "the stacks": ("olmoe", "experts", {"experts.gate_up_proj": 8, "experts.down_proj": 8}),
    "a router": ("llama4_text", "router", {"router": 2}),
}


@pytest.mark.parametrize("case", TARGETS)
def test_words_of_adapters_mean_what_peft_takes_them_for(case: str) -> None:
    """The feed-forward's adapters and the rows of A: rank 2 of each of 4 experts, twice that of gate and up in one."""
    family, target, adapted = TARGETS[case]
    sizes: dict[str, Any] = dict(model=family, experts=4, hidden=32, heads=4, layers=1, ranks=1)
    config = RunConfig(**sizes, lora_rank=2, lora_target=target)
    ranks = dict[str, int]()
    for name, (rows, *_) in build_model(config, cpu()).shapes().items():
        at, is_a, _ = name.partition(".lora_A.")
        if is_a and ".self_attn." not in at:
            ranks[at.partition(".0.")[2].partition(".")[2]] = rows
    assert ranks == adapted


def test_one_half_of_a_stack_has_no_adapter() -> None:
    config = RunConfig(model="mixtral", ranks=1, lora_rank=2, lora_target="q,gate")
    with pytest.raises(InputError, match="gate and up are one weight, and PEFT adapts both or none; choose gate,up"):
        run(config)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too many": (dict(experts=4, top_k=5), "top_k 5: there are 4 experts; choose 4 or fewer"),
    "no experts": (dict(model="llama", top_k=2), "top_k 2: means experts, and there are none; pass --experts too"),
    "a dense family": (dict(model="qwen3", experts=8), "experts 8: model qwen3 has no experts; choose gpt or llama"),
    "without them": (dict(model="mixtral", experts=0), "experts 0: a mixtral has experts; choose model llama"),
    "no shared ones": (dict(model="mixtral", shared_experts=1), "shared_experts 1: a mixtral has none; choose 0"),
    "an option alone": (dict(routing="even"), "routing 'even': gpt has no experts; pass --experts too"),
    "a rate alone": (dict(bias_rate=0.1), "bias_rate 0.1: gpt has no experts; pass --experts too"),
    "no capacity": (dict(experts=4, token_drop="weight"), "token_drop 'weight': no token is dropped without"),
    "below a row": (dict(experts=4, capacity_factor=0), "capacity_factor 0: expected more than 0"),
    "no loss": (dict(experts=4, aux_loss_over="sequence"), "aux_loss_over 'sequence': there is no such loss"),
    "shared sequences": (
        dict(experts=4, aux_loss=0.1, aux_loss_over="sequence", cp=2, ranks=2, attention="flash"),
        "aux_loss_over 'sequence': the 2 ranks of cp share each sequence; choose batch",
    ),
    "width over tp": (dict(experts=4, expert_ffn=9, tp=2, ranks=2), "tp 2 does not divide expert_ffn 9"),
    "adapters over tp": (
        dict(experts=4, tp=2, ranks=2, lora_rank=2, lora_target="experts"),
        "lora_target 'experts': adapters of experts are whole; choose tp 1",
    ),
    "tiles": (dict(experts=4, tiles=2, gather="module", stage=3), "tiles 2: experts are gathered as one module"),
    "tokens in tiles": (dict(experts=4, mlp_tile=4), "mlp_tile 4: experts need all tokens at once"),
}


@pytest.mark.parametrize(("fields", "words"), REFUSED.values(), ids=REFUSED)
def test_bad_sizes_are_one_line(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        RunConfig(**fields)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


FILE: dict[str, Any] = dict(
    model_type="qwen3_moe", vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
)  # fmt: skip
FILES_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too many": (dict(num_experts_per_tok=5), "num_experts_per_tok 5: more than the 4 experts"),
    "some dense": (dict(mlp_only_layers=[1]), "mlp_only_layers [1]: no model here has them"),
    "all dense": (dict(decoder_sparse_step=3), "no block has experts"),
    "a router": (dict(scoring_func="sqrtsoftplus"), 'scoring_func "sqrtsoftplus" is not modelled'),
    "others": (dict(moe_latent_size=8), "moe_latent_size 8 is not modelled: a qwen3_moe has no such experts"),
    "no layer": (
        dict(model_type="glm4_moe", num_key_value_heads=2, n_group=3),
        "n_group 3, topk_group 1: expected a divisor of 4 experts",
    ),
}


@pytest.mark.parametrize(("changes", "words"), FILES_REFUSED.values(), ids=FILES_REFUSED)
def test_a_file_with_other_experts_is_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        model_of("config.json", FILE | changes)
    assert str(error.value).startswith(f"config.json: {words}")
    assert "\n" not in str(error.value)


def test_codes_are_of_maps_and_never_of_a_router() -> None:
    tuning = RunConfig(experts=4, lora_rank=2, base="nf4").tuning
    assert kind_of(tuning, "h.0.mlp.gate.weight", (4, 64), Role(1, "router")) == "frozen"
    assert kind_of(tuning, "h.0.attn.c_attn.weight", (64, 64), Role(0, "columns")) == "nf4"
