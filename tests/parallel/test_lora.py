"""Adapters beside frozen maps: the same bits at every stage, the base as it was, and a plan that counts the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.config import RunConfig
from zerosim.config.parts.tuning import is_adapter
from zerosim.device.events import Alloc, Free
from zerosim.errors import InputError
from zerosim.models.adapters import adapters_of, merged
from zerosim.train.plan import plan
from zerosim.train.run import run

GPT: dict[str, Any] = dict(layers=3, hidden=16, heads=2, seq=8, vocab=256, steps=3, micro_batch=1, seed=5, lora_rank=4)
LLAMA = GPT | dict(model="llama", heads=4, kv_heads=2)
CAST = dict(adapter_dtype="fp32", autocast="bf16")
KBIT = dict(base="nf4", prepare_kbit=True, attention="flash")
CASES: tuple[dict[str, Any], ...] = (
    *(GPT | dict(ranks=4, stage=stage) for stage in range(4)),
    *(GPT | dict(ranks=2, stage=stage, lora_target="all-linear", lora_dropout=0.2) for stage in (1, 3)),
    GPT | dict(ranks=2, stage=2, lora_target="c_attn,h.[01].mlp.c_fc", lora_alpha=16.0, accumulate=2),
    GPT | dict(ranks=4, stage=3, lora_target="h.1.attn.q", dp_replicate=2),
    GPT | dict(ranks=2, stage=3, recipe="deepspeed", lora_dropout=0.1),
    GPT | dict(ranks=2, stage=3, recipe="fsdp2", recompute="full", lora_target="all-linear", lora_dropout=0.1),
    GPT | dict(ranks=2, stage=2, partition="owner", freeze="!ln_f,!wte"),
    GPT | dict(ranks=4, stage=3, tp=2, lora_target="all-linear", lora_dropout=0.1),
    GPT | dict(ranks=4, stage=1, tp=2, sequence_parallel=True, lora_target="all-linear", recipe="megatron"),
    GPT | dict(ranks=2, stage=0, recipe="ddp"),
    GPT | dict(ranks=4, stage=0, recipe="ddp", tp=2, lora_target="all-linear"),
    GPT | dict(ranks=4, stage=2, pp=2, accumulate=4, layers=4),
    GPT | dict(ranks=4, stage=0, pp=2, accumulate=4, pipeline="zb-h1", layers=4),
    *(LLAMA | dict(ranks=2, stage=stage, lora_target="all-linear") for stage in range(4)),
    LLAMA | dict(ranks=4, stage=1, tp=4, lora_target="q,k,v,o,gate,up,down"),
    LLAMA | dict(ranks=2, stage=2, freeze="layers.0", lora_target="q_proj"),
    *(LLAMA | dict(ranks=4, stage=stage, base="nf4") for stage in range(4)),
    *(LLAMA | dict(ranks=3, stage=stage, base="gptq") for stage in (0, 3)),
    LLAMA | dict(ranks=2, stage=3, base="gptq", gather="module", tp=2, lora_target="all-linear", recompute="full"),
    GPT | dict(ranks=3, stage=3, base="nf4", gather="module", recipe="deepspeed", lora_target="all-linear"),
    GPT | dict(ranks=2, stage=1, base="nf4", freeze="h.0"),  # adapters that are frozen stay numbers
    LLAMA | dict(ranks=2, stage=3, base="nf4", freeze="lora_A", gather="module", lora_target="all-linear"),
    GPT | dict(ranks=4, stage=3, base="nf4", tp=2, lora_target="all-linear", recompute="full"),
    GPT | dict(ranks=4, stage=3, base="nf4", partition="owner", dp_replicate=2, lora_dropout=0.1),
    *(LLAMA | dict(ranks=2, stage=stage, adapter_dtype="fp32", lora_dropout=0.2) for stage in range(4)),
    LLAMA | dict(ranks=2, stage=3, adapter_dtype="fp32", base="nf4", gather="module", lora_target="all-linear"),
    LLAMA | dict(ranks=2, stage=3, adapter_dtype="fp32", recompute="selective:layernorm", lora_target="all-linear"),
    GPT | dict(ranks=4, stage=3, adapter_dtype="fp32", dp_replicate=2, recipe="fsdp2"),
    GPT | dict(ranks=2, stage=3, recipe="fsdp1", accumulate=2),
    LLAMA | dict(ranks=3, stage=3, recipe="fsdp2", frozen_fp32=True, recompute="full"),
    LLAMA | dict(ranks=2, stage=3, base="nf4", whole_scales=True, gather="module", lora_target="all-linear"),
    GPT | dict(ranks=4, stage=3, base="nf4", whole_scales=True, tp=2, recompute="full"),
    GPT | dict(ranks=2, stage=3, base="nf4", recipe="fsdp2"),
    GPT | dict(ranks=3, stage=3, base="nf4", recipe="fsdp2", partition="owner"),
    GPT | dict(ranks=2, stage=3, base="nf4", recipe="fsdp1", offload="params=host"),
    GPT | dict(ranks=4, stage=3, recipe="fsdp1", dp_replicate=2, base="nf4", accumulate=2, recompute="full:2"),
    LLAMA | dict(ranks=3, stage=3, recipe="fsdp1", adapter_dtype="fp32", lora_target="all-linear", recompute="full"),
    LLAMA | dict(ranks=2, stage=2, recipe="fsdp1", lora_dropout=0.1, recompute="full"),
    GPT | dict(ranks=2, stage=2, adapter_dtype="fp32", offload="optimizer=host"),
    GPT | dict(ranks=2, stage=1, adapter_dtype="bf16", lora_dropout=0.2, recompute="full"),
    LLAMA | dict(ranks=4, stage=0, adapter_dtype="fp32", pp=2, accumulate=4, pipeline="zb-h1", layers=4),
    *(LLAMA | dict(ranks=2, stage=stage, **CAST, recompute="full", lora_dropout=0.2) for stage in (0, 3)),
    LLAMA | dict(ranks=2, stage=2, **CAST, base="nf4", recompute="selective:layernorm", lora_target="all-linear"),
    LLAMA | dict(ranks=2, stage=1, **CAST, fused_lora=True, lora_dropout=0.2, lora_target="all-linear", saves="liger"),
    *(LLAMA | dict(ranks=2, stage=stage, **CAST, **KBIT, recompute="full") for stage in (0, 2, 3)),
    LLAMA | dict(ranks=2, stage=1, **CAST, **KBIT, lora_target="all-linear", lora_dropout=0.1, saves="eager"),
    *(GPT | dict(ranks=2, stage=stage, **CAST, base="nf4", recompute="full", use_cache=True) for stage in (0, 3)),
    GPT | dict(ranks=2, stage=3, **CAST, base="nf4", lora_target="all-linear", dropout=0.1, gather="module"),
    GPT | dict(ranks=2, stage=2, **CAST, base="nf4", recompute="full", cpu_checkpointing=True),
    GPT | dict(ranks=1, stage=0, **CAST, base="nf4", recompute="full", cpu_checkpointing=True, model="bloom"),
    LLAMA | dict(ranks=1, stage=0, **CAST, **KBIT, recompute="full:2", cpu_checkpointing=True),
    LLAMA | dict(ranks=2, stage=3, base="nf4", bnb_saves_input=True, adapter_dtype="bf16", recompute="full:2"),
    LLAMA | dict(ranks=4, stage=0, **CAST, fused_lora=True, pp=2, accumulate=4, pipeline="zb-h1", layers=4),
    LLAMA | dict(ranks=2, stage=2, base="nf4", pp=2, accumulate=2, layers=4, pipeline="zb-h1"),
)


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_base_stays_as_it_was_and_a_plan_counts_the_same(case: dict[str, Any]) -> None:
    config = RunConfig(**case)
    result, planned = run(config), plan(config, every_rank=True)
    assert [one.to_dict() for one in planned.memory] == [one.to_dict() for one in result.memory]
    assert planned.traffic == result.traffic
    assert formulas_agree(checks(result))
    first = run(config.replace(steps=1, lr=1e-30)).weights
    changed = {name for name, values in result.weights.items() if np.any(values != first[name])}
    assert changed == set(filter(config.tuning.trains, first))
    assert any(map(is_adapter, changed))


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize(
    "more",
    [
        {},
        dict(lora_target="all-linear", lora_dropout=0.3),
        dict(model="llama"),
        dict(base="nf4"),
        dict(model="llama", base="gptq"),
        dict(adapter_dtype="fp32", lora_dropout=0.1),
        dict(adapter_dtype="fp32", base="nf4"),
        dict(**CAST, lora_dropout=0.1),
        dict(**CAST, **KBIT, model="llama"),
        dict(**CAST, base="nf4", bnb_saves_input=True, dropout=0.1),
    ],
    ids=str,
)
def test_all_stages_give_the_same_bits(more: dict[str, Any]) -> None:
    config = RunConfig(**GPT | more, ranks=2, stage=0)
    changes: list[dict[str, Any]] = [dict(stage=stage) for stage in range(4)]
    changes += [dict(stage=3, gather="module"), dict(stage=2, partition="owner"), dict(stage=3, recompute="full")]
    first, *others = [run(config.replace(**change)) for change in changes]
    for other in others:
        assert other.losses == first.losses
        assert all(np.array_equal(other.weights[name], one) for name, one in first.weights.items())


@pytest.mark.quick(1)
@pytest.mark.parametrize("more", [dict(model="gpt"), dict(model="llama", kv_heads=2)], ids=str)
@pytest.mark.parametrize("mesh", [dict(tp=2), dict(tp=2, sequence_parallel=True), dict(tp=4), dict(pp=3)], ids=str)
def test_meshes_compute_the_same(more: dict[str, Any], mesh: dict[str, Any]) -> None:
    """Losses and weights of one rank, in fp64; Adam with a large eps, so that no sign of a zero decides."""
    same = GPT | more | dict(
        precision="fp64", heads=4, lora_target="all-linear", eps=1.0, lr=0.1, accumulate=3,
    )  # fmt: skip
    if more["model"] == "gpt":
        same |= dict(lora_dropout=0.2)
    one, other = (
        run(RunConfig(**same, ranks=1)),
        run(RunConfig(**same, ranks=np.prod([*mesh.values()][:1]).item(), **mesh)),
    )
    np.testing.assert_allclose(other.losses, one.losses, rtol=1e-12)
    for name, values in one.weights.items():
        np.testing.assert_allclose(other.weights[name], values, rtol=1e-9, atol=1e-12, err_msg=name)


def test_gpt3_with_rank_4_on_q_and_v_trains_18874368_parameters() -> None:
    """LoRA (arXiv 2106.09685), section 4.2: 35 MB of a checkpoint in fp16."""
    result = plan(RunConfig(model="gpt3-175b", ranks=1, lora_rank=4, micro_batch=1, seq=8))
    layout = result.layout
    trained = sum(flat.num_parameters for name, flat in layout.flats.items() if layout.is_trained(name))
    assert trained == 18_874_368
    assert result.memory[0].marks["after_init"].by_kind["optim"] == 12 * trained


@pytest.mark.quick(1)
@pytest.mark.parametrize("more", [dict(model="gpt"), dict(model="llama", heads=4, kv_heads=2)], ids=str)
@pytest.mark.parametrize("target", ["q,v", "all-linear", "c_proj,o_proj,down"])
def test_merged_weights_compute_the_same(more: dict[str, Any], target: str, tmp_path: Path) -> None:
    if more["model"] == "llama":
        target = target.replace("c_proj,", "")
    elif "o_proj" in target:
        target = "c_proj,down"
    tuned = RunConfig(
        **GPT | more | dict(precision="fp64", lora_target=target, lora_alpha=8.0, steps=4, lr=0.05), ranks=2
    )
    result = run(tuned)
    np.savez(tmp_path / "tuned.npz", **result.weights)
    np.savez(tmp_path / "merged.npz", **merged(result.weights, tuned))
    np.savez(tmp_path / "adapters.npz", **adapters_of(result.weights))
    start = dict(steps=1, seed=9)
    before = run(tuned.replace(**start, weights=str(tmp_path / "tuned.npz")))
    plain = tuned.replace(**start, lora_rank=None, lora_alpha=None, lora_target=None)
    after = run(plain.replace(weights=str(tmp_path / "merged.npz")))
    np.testing.assert_allclose(after.losses, before.losses, rtol=1e-6)  # files hold fp32 or fp64 as they were
    np.savez(tmp_path / "base.npz", **{n: w for n, w in result.weights.items() if not is_adapter(n)})
    apart = tuned.replace(**start, weights=str(tmp_path / "base.npz"), adapters=str(tmp_path / "adapters.npz"))
    assert run(apart).losses == before.losses
    assert run(plain.replace(weights=str(tmp_path / "base.npz"))).losses != before.losses


def test_a_base_in_nf4_takes_4_bits_and_a_copy_of_one_map_at_a_time() -> None:
    config = RunConfig(
        model="gpt", layers=2, hidden=256, heads=4, seq=8, vocab=256, micro_batch=1, lora_rank=4, ranks=2
    )
    for stage in (2, 3):
        plain, codes = (plan(config.replace(stage=stage, base=base)) for base in (None, "nf4"))
        maps = 2 * 12 * 256 * 256
        shards = 1 if stage < 3 else 2
        held = [result.memory[0].marks["after_init"].by_kind["param"] for result in (plain, codes)]
        spared = 2 * maps - maps * (1 / 2 + 1 / 64 + 4 / 64 / 256)
        assert held[0] - held[1] == pytest.approx(spared / shards, rel=1e-4)
        most = {event.nbytes for event in plan(config.replace(stage=stage, base="nf4"), keep_events=True).events[0]
                if isinstance(event, Alloc) and event.kind == "temp" and event.nbytes > 2 * 256 * 256}  # fmt: skip
        assert most == {2 * 3 * 256 * 256, 2 * 4 * 256 * 256}


def test_merged_weights_of_a_base_in_nf4_are_the_codes_values() -> None:
    config = RunConfig(**GPT, ranks=2, stage=3, base="nf4")
    tuned, plain = run(config).weights, run(config.replace(base=None)).weights
    for name, values in tuned.items():
        if name.startswith("h.") and values.ndim == 2 and not is_adapter(name):
            assert np.unique(values).size < values.size // 2
            assert 0 < np.abs(values - plain[name]).max() <= 0.16 * np.abs(plain[name]).max()


@pytest.mark.parametrize("stage", range(4))
def test_fp32_adapters_take_16_bytes_and_no_master(stage: int) -> None:
    """4 of the parameter, 4 of the gradient and 8 of the moments, beside a base in bf16."""
    config = RunConfig(**LLAMA, ranks=2, stage=stage, adapter_dtype="fp32")
    result = plan(config)
    layout, marks = result.layout, result.memory[0].marks
    trained = sum(flat.num_parameters for name, flat in layout.flats.items() if layout.is_trained(name))
    frozen = sum(flat.num_parameters for flat in layout.flats.values()) - trained
    states = marks["end_of_backward"].by_kind
    assert states["param"] == (2 * frozen + 4 * trained) // (2 if stage == 3 else 1)
    assert states["grad"] == 4 * trained // (2 if stage >= 2 else 1)
    assert states["optim"] == 8 * trained // (2 if stage >= 1 else 1)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (dict(lora_rank=0), "adapter_dtype 'fp32': no adapters without a lora_rank"),
        (dict(adapter_dtype="fp16"), "adapter_dtype 'fp16': the base is bf16"),
        (dict(precision="fp64"), "adapter_dtype 'fp32': the base is fp64"),
        (dict(precision="bf16-pure"), "choose precision bf16"),
        (dict(grad_dtype="bf16"), "grad_dtype 'bf16': fp32 adapters have fp32 gradients"),
        (dict(freeze="h.0"), "leave out freeze"),
        (dict(tp=2), "PEFT does not cut adapters over tp 2"),
        (dict(autocast="fp16"), "autocast 'fp16': the base is bf16; choose bf16"),
        (dict(adapter_dtype="bf16", autocast="bf16"), "only fp32 adapters are cast"),
        (dict(adapter_dtype=None, fused_lora=True), "add adapter_dtype fp32 or bf16"),
        (dict(lora_rank=0, adapter_dtype=None, fused_lora=True), "there are no adapters; choose a lora_rank"),
        (dict(bnb_saves_input=True), "it is for base nf4"),
        (dict(bnb_saves_input=True, base="gptq", model="llama", kv_heads=2), "it is for base nf4"),
        (dict(prepare_kbit=True, model="llama"), "it is for 4-bit maps under autocast; add base nf4 and autocast bf16"),
        (dict(prepare_kbit=True, base="nf4", autocast="bf16"), "blocks of model gpt are not like Llama's"),
        (dict(base="nf4", autocast="bf16", pp=2), "activations between blocks would be fp32; leave out pp"),
        (dict(prepare_kbit=True, base="nf4", autocast="bf16", fused_lora=True, model="llama"), "leave out fused_lora"),
        (dict(cast_shards=True, stage=3), "cast_shards keeps fp32 shards already"),
        (dict(recipe="deepspeed", stage=2), "upcast_grads is DeepSpeed's"),
        (dict(stage=3, offload="params=host"), "offload the optimizer too"),
    ],
)
def test_adapters_of_a_dtype_that_peft_does_not_have_are_refused(case: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        RunConfig(**dict(lora_rank=4, adapter_dtype="fp32", ranks=2) | case)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_fused_adapters_compute_as_others(dropout: float) -> None:
    """What is kept and what is recomputed changes no bit, where nothing is cast; nor does autocast's cache."""
    config = RunConfig(**LLAMA, ranks=1, adapter_dtype="bf16", lora_target="all-linear", lora_dropout=dropout)
    plain, fused = run(config), run(config.replace(fused_lora=True))
    assert all(np.array_equal(fused.weights[name], one) for name, one in plain.weights.items())
    cast = config.replace(adapter_dtype="fp32", autocast="bf16")
    once, again = run(cast), run(cast.replace(recompute="full"))
    assert all(np.array_equal(again.weights[name], one) for name, one in once.weights.items())


def test_autocast_caches_casts_of_adapters_until_forward_ends() -> None:
    """2 bytes of each trained parameter with recompute on gathered weights, none at stage 3."""
    config = RunConfig(
        **LLAMA | dict(seq=32, micro_batch=2),
        ranks=1,
        attention="flash",
        recompute="full",
        adapter_dtype="fp32",
        loss="hf-4.48",
    )
    trained = 3 * 4 * (16 + 16 + 16 + 8)
    for stage, bytes_each in ((0, 2), (2, 2), (3, 0)):
        plain, cast = (plan(config.replace(stage=stage, autocast=one)).memory[0] for one in (None, "bf16"))
        assert cast.peak.total_bytes - plain.peak.total_bytes == bytes_each * trained
        assert cast.marks["end_of_forward"].by_kind == plain.marks["end_of_forward"].by_kind


def test_a_layer_norm_under_autocast_widens_the_stream_of_a_4_bit_model() -> None:
    """As transformers 4.48's gpt_bigcode with bitsandbytes: the first block reads 2 bytes an element, all others 4."""
    config = RunConfig(**GPT, ranks=1, adapter_dtype="fp32", autocast="bf16", base="nf4", recompute="full")

    def inputs(**more: Any) -> list[int]:
        saved = plan(config.replace(**more)).saved
        return [saved[f"h.{block}"][0].nbytes // (8 * 16) for block in range(3)]

    assert inputs() == [2, 4, 4]
    assert inputs(autocast=None) == inputs(base=None) == inputs(fused_lora=True) == [2, 2, 2]
    assert inputs(model="gptj") == [2, 2, 2]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_inputs_of_4_bit_maps_live_until_their_graph_dies(recompute: str) -> None:
    """In the last block's backward through its gate: q, k and v's input, the gate's, and 2f of down's, which it has
    left. o's is attention's output. Without recompute of all blocks."""
    base = RunConfig(
        **LLAMA | dict(seq=64, ffn=160), ranks=1, attention="flash", saves="eager", base="nf4", adapter_dtype="fp32",
        lora_dropout=0.1, recompute=recompute, loss="in-place",
    )  # fmt: skip
    plain, held = (plan(base.replace(bnb_saves_input=one)).memory[0] for one in (False, True))
    blocks = 3 if recompute == "none" else 1
    assert held.peak.total_bytes - plain.peak.total_bytes == blocks * 64 * (2 * 16 + 2 * 16 + 2 * 160)
    assert held.marks["end_of_backward"].total_bytes == plain.marks["end_of_backward"].total_bytes


@pytest.mark.parametrize(
    ("more", "phase"),
    [
        (dict(), "backward"),
        (dict(adapter_dtype=None), "forward"),
        (dict(saves="litgpt"), "forward"),
    ],
)
def test_a_frozen_tables_rows_live_through_backward_where_they_are_scaled(more: dict[str, Any], phase: str) -> None:
    """As Gemma's: by PEFT they require a gradient, so the graph of checkpointed blocks holds them as a leaf."""
    base = dict(LLAMA, model="gemma", ranks=1, recompute="full", adapter_dtype="fp32", loss="hf-5")
    result = plan(RunConfig(**base | more), keep_events=True)
    events = [e for e in result.events[0] if e.scope.step == 0]
    tables = [e for e in events if isinstance(e, Alloc) and e.scope.unit == "embed_tokens"]
    rows = next(e for e in tables if e.kind == "activation")
    last = next(e for e in events if isinstance(e, Free) and e.id == rows.id)
    assert last.scope.phase == phase
    assert formulas_agree(checks(result))
