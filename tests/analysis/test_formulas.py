"""The closed forms against printed numbers, and against sums written out another way."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from zerosim.analysis import formulas
from zerosim.analysis.forms import forms, of
from zerosim.analysis.formulas import (
    FIGURE_1,
    TABLE_1,
    BytesPerParameter,
    Schedule,
    block_activations,
    block_parts,
    bytes_per_parameter,
    bytes_per_parameter_at,
    decoder_parameters,
    largest_model,
    megatron_parameters,
    model_states,
    optimizer_step_states,
    printed,
    twelve_l_h_squared,
    volume,
)
from zerosim.analysis.formulas.form import Form, group, ring, symbol, symbols
from zerosim.analysis.formulas.letters import LETTERS
from zerosim.config import RunConfig

MIXED = BytesPerParameter(2, 2, 12)
FP32 = BytesPerParameter(4, 4, 8)
GB = 10**9


def total(stage: int, psi: int, ranks: int, cost: BytesPerParameter = MIXED) -> Fraction:
    return formulas.total(model_states(stage, cost).values()).at(Ψ=psi, N=ranks)


# -- model states -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.40625), (2, 16.640625), (3, 1.875)])
def test_figure_1(stage: int, gigabytes: float) -> None:
    """7.5B parameters on 64 ranks: printed 120, 31.4, 16.6 and 1.9 GB (ZeRO paper, Figure 1)."""
    exact = total(stage, 7_500_000_000, 64)
    assert exact == Fraction(gigabytes) * GB
    assert printed(exact / GB, FIGURE_1[stage]) == FIGURE_1[stage]


def test_all_54_cells_of_table_1_are_printed_as_the_paper_does() -> None:
    cells = [
        (total(stage, psi, ranks) / GB, row[stage - 1])
        for psi, rows in TABLE_1.items()
        for ranks, row in rows.items()
        for stage in (1, 2, 3)
    ]
    assert len(cells) == 54
    for exact, shown in cells:
        assert printed(exact, shown) == shown, exact


@pytest.mark.parametrize(
    ("value", "like", "text"),
    [("41.25", "41.3", "41.3"), ("513.5", "513", "513"), ("2218.75", "2218", "2218"), ("99.96", "9.9", "100.0")],
)
def test_below_100_is_rounded_half_up_and_from_100_cut(value: str, like: str, text: str) -> None:
    assert printed(Fraction(value), like) == text


def test_where_the_paper_prints_a_question() -> None:
    def found(stage: int, psi: int, ranks: int) -> list[tuple[str, str]]:
        return [(figure.where, figure.gigabytes) for figure in formulas.printed_states(stage, psi, ranks)]

    assert found(3, 7_500_000_000, 64) == [("Figure 1", "1.9"), ("Table 1", "1.88")]
    assert found(0, 7_500_000_000, 64) == [("Figure 1", "120")]
    assert found(3, 10**12, 1024) == [("Table 1", "15.6")]
    assert found(3, 10**12, 1000) == []


@pytest.mark.parametrize(
    ("mp", "shown"),
    [
        (1, (2, 7.6, 14.4, 128)), (2, (4, 15.2, 28.8, 256)), (4, (8, 30.4, 57.6, 512)),
        (8, (16, 60.8, 115.2, 1024)), (16, (32, 121.6, 230.4, 2048)),
    ],
)  # fmt: skip
def test_table_2(mp: int, shown: tuple[float, ...]) -> None:
    """Printed rows are multiples of the rounded first row; its last column 0.5T, 1T, 2T is rounded once more."""
    for stage, value in enumerate(shown):
        first = largest_model(32 * GB, stage, 64, MIXED) / GB
        assert mp * Fraction(printed(first, str(shown[stage]))) == Fraction(str(value))
        assert largest_model(32 * GB, stage, 64, MIXED, mp) == mp * first * GB


def test_a_largest_model_fills_the_memory_exactly() -> None:
    psi = largest_model(32 * GB, 2, 64, MIXED)
    assert psi * bytes_per_parameter_at(2, 64, MIXED) == 32 * GB


@pytest.mark.parametrize(
    ("stage", "mixed", "fp32"),
    [(0, "16Ψ", "16Ψ"), (1, "4Ψ + 12Ψ/N", "8Ψ + 8Ψ/N"), (2, "2Ψ + 14Ψ/N", "4Ψ + 12Ψ/N"), (3, "16Ψ/N", "16Ψ/N")],
)
def test_text(stage: int, mixed: str, fp32: str) -> None:
    assert str(formulas.total(model_states(stage, MIXED).values())) == mixed
    assert str(formulas.total(model_states(stage, FP32).values())) == fp32


def test_sgd_without_state_in_fp32_has_nothing_to_partition_in_stage_1() -> None:
    assert str(formulas.total(model_states(1, BytesPerParameter(4, 4, 0)).values())) == "8Ψ"


def test_megatron_conventions() -> None:
    """18 bytes, 6 + 12/d in bf16 with fp32 gradients; 16, 8 + 8/d in fp32 (its docs on the distributed optimizer)."""
    bf16, fp32 = bytes_per_parameter(2, 4, 2), bytes_per_parameter(4, 4, 2)
    assert [bytes_per_parameter_at(stage, 8, bf16) for stage in (0, 1)] == [18, 6 + Fraction(12, 8)]
    assert [bytes_per_parameter_at(stage, 8, fp32) for stage in (0, 1)] == [16, 8 + Fraction(8, 8)]


def test_a_cast_shard_costs_no_bytes_of_its_own() -> None:
    """FSDP2's mixed precision: fp32 shard, fp32 gradient, two moments, 4 + 4 + 8."""
    cost = bytes_per_parameter(2, 4, 2, cast_shards=True)
    assert bytes_per_parameter_at(3, 8, cost) == Fraction(4 + 4 + 8, 8)
    assert model_states(3, cost)["param"] == Form()
    assert bytes_per_parameter(4, 4, 2, cast_shards=True) == FP32  # there is nothing to cast


def test_deepspeeds_fp32_copies_of_gradients() -> None:
    """2 + 18/N in stage 2 is its estimator's; stage 3's 18/N leaves out the 2-byte gradients."""
    psi, ranks = 7_500_000_000, 64

    def states(stage: int) -> dict[str, Fraction]:
        forms = optimizer_step_states(stage, MIXED, upcast_grads=True)
        return {kind: form.at(Ψ=psi, N=ranks) for kind, form in forms.items()}

    estimator = {c.name: c for c in formulas.calculators()}["DeepSpeed estimator, code"]
    assert sum(states(2).values()) == 2 * psi + Fraction(18 * psi, ranks) == estimator.model_states(2, psi, ranks)
    assert sum(states(3).values()) == Fraction(20 * psi, ranks)
    assert sum(states(3).values()) - states(3)["grad"] == estimator.model_states(3, psi, ranks)
    assert states(1)["upcast"] == Fraction(4 * psi, ranks)
    assert states(0)["upcast"] == 4 * psi
    assert str(formulas.total(optimizer_step_states(2, MIXED, upcast_grads=True).values())) == "2Ψ + 18Ψ/N"
    fp32_grads = optimizer_step_states(2, BytesPerParameter(2, 4, 12), upcast_grads=True)
    assert fp32_grads["upcast"] == Form()


# -- traffic ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("stage", "text"), [(0, "2Ψ"), (1, "2Ψ"), (2, "2Ψ"), (3, "3Ψ")])
def test_volume(stage: int, text: str) -> None:
    """Section 7 of the paper; one rank sends nothing."""
    assert str(volume(stage)) == text == formulas.VOLUME[stage]
    assert volume(stage).total.at(Ψ=1000, N=1, w=2, g=2) == 0
    assert volume(stage).total.at(Ψ=1000, N=4, w=2, g=2) == Fraction(3, 4) * int(text[0]) * 2000


def test_volume_of_the_awkward_cases() -> None:
    assert str(volume(3, Schedule(tied=True))) == "3Ψ + 2VD"
    assert str(volume(2, Schedule(4))) == "5Ψ"
    assert str(volume(3, Schedule(4))) == "12Ψ"
    assert str(volume(1, Schedule(4))) == "2Ψ"
    assert str(volume(3, Schedule(tied=True, reshard_after_forward=False))) == "2Ψ"
    assert volume(2).total.at(Ψ=1000, N=2, w=2, g=4) == Fraction(1, 2) * (2000 + 4000)


@pytest.mark.parametrize(("stage", "batches", "text"), [(1, 1, "3Ψ"), (1, 4, "3Ψ"), (2, 1, "3Ψ"), (2, 4, "9Ψ")])
def test_gradients_that_are_all_reduced(stage: int, batches: int, text: str) -> None:
    """2Ψ + Ψ, and 2AΨ + Ψ in stage 2."""
    config = RunConfig(model="flat", ranks=2, stage=stage, accumulate=batches, grad_reduction="all_reduce")
    sent = of(forms(config), "sent")
    assert str(formulas.total(sent.values()).elements) == text
    assert list(sent) == [("all_reduce", "states"), ("all_gather", "states")]


def gathered(units: list[tuple[int, str]], batches: int, *, keep_root: bool, threshold: int) -> int:
    """Elements gathered per step of stage 3, counted unit by unit: [(elements, 'root' or 'block')]."""
    elements = 0
    for numel, where in units:
        if numel < threshold:
            elements += numel  # once, after the optimizer step
        elif where == "root" and keep_root:
            elements += batches * numel
        else:
            elements += 2 * batches * numel
    return elements


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("keep_root", [False, True])
@pytest.mark.parametrize("threshold", [0, 70])
def test_units_that_stay_gathered(batches: int, keep_root: bool, threshold: int) -> None:
    units = [(1000, "root"), (64, "root"), (300, "block"), (50, "block"), (300, "block"), (8, "root")]
    psi = sum(numel for numel, _ in units)
    persistent = sum(numel for numel, _ in units if numel < threshold)
    root = sum(numel for numel, where in units if where == "root" and numel >= threshold)
    form = volume(3, Schedule(batches, keep_root_units=keep_root, persistent=bool(threshold)))
    sent = form.params.at(Ψ=psi, N=2, w=2, R=root, P=persistent)
    assert sent == gathered(units, batches, keep_root=keep_root, threshold=threshold)  # 2 bytes * (2-1)/2
    assert form.grads.at(Ψ=psi, N=2, g=2) == batches * psi


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(keep_root_units=True), "3Ψ - R"),
        (dict(keep_root_units=True, tied=True), "3Ψ - R"),
        (dict(keep_root_units=True, keep_last_unit=True), "3Ψ - U - R"),
        (dict(keep_last_unit=True), "3Ψ - U"),
        (dict(keep_last_unit=True, micro_batches=2), "6Ψ - 2U"),
        (dict(keep_last_unit=True, tied=True), "3Ψ + VD"),
        (dict(micro_batches=2, tied=True), "6Ψ + 4VD"),
        (dict(persistent=True), "3Ψ - P"),
        (dict(persistent=True, micro_batches=2), "6Ψ - 3P"),
        (dict(persistent=True, tied=True), "3Ψ + 2VD - P"),
        (dict(persistent=True, keep_root_units=True), "3Ψ - R - P"),
        (dict(persistent=True, reshard_after_forward=False), "2Ψ"),
        (dict(persistent=True, reshard_after_forward=False, micro_batches=3), "6Ψ - 2P"),
    ],
)
def test_volumes_of_kept_units_in_words(changes: dict[str, bool], text: str) -> None:
    assert str(volume(3, Schedule(**changes))) == text


# -- forms --------------------------------------------------------------------------------------------
def test_a_form_is_a_value_with_a_text_and_exact_numbers() -> None:
    psi, n, p, m, v, i = symbols("Ψ N p m v i")
    states = 2 * psi + 2 * psi / n + 12 * psi / n
    assert str(states) == "2Ψ + 14Ψ/N"
    assert states == 2 * psi + 14 * psi / n
    assert states.at({"Ψ": 7_500_000_000}, N=64) == Fraction(2 * 64 + 14, 64) * 7_500_000_000
    assert str(states.where(N=4)) == "5.5Ψ"
    assert states.where(Ψ=2 * m, N=p) == 4 * m + 28 * m / p
    assert states.symbols == {"Ψ", "N"}
    assert str(psi - psi) == str(states.where(Ψ=0)) == "0"
    assert str(3 * psi - 2 * symbol("VD") - 6) == "3Ψ - 2VD - 6"
    bubble = group("sum", p - 1) / (v * m)
    assert (str(bubble), str(bubble.where(v=1)), bubble.at(p=4, v=2, m=8)) == ("(p-1)/(vm)", "(p-1)/m", Fraction(3, 16))
    live = group("least", m, p - i)
    assert (str(live), live.at(m=8, p=4, i=1), live.at(m=2, p=4, i=1)) == ("min(m, p-i)", 3, 2)
    sent = ring(n) * symbol("g") * 2 * psi + ring(n) * symbol("w") * psi
    assert (str(sent.elements), sent.at(Ψ=100, N=4, g=4, w=2)) == ("3Ψ", 750)
    assert str(5 * m * m * psi / n) == "5m²Ψ/N"
    with pytest.raises(KeyError, match="no value for N, w"):
        sent.at(Ψ=1, g=4)


# -- activations --------------------------------------------------------------------------------------
S, B, H, A = 1024, 32, 1600, 25
SIZES = {"s": S, "b": B, "h": H, "a": A, "f": 4 * H, "t": 1}


def test_the_parts_of_a_block_make_34sbh_and_the_scores() -> None:
    parts = {name: form.at(SIZES) for name, form in block_parts().items()}
    sbh = S * B * H
    assert parts == {"attention": 11 * sbh + 5 * A * S * S * B, "mlp": 19 * sbh, "layernorms": 4 * sbh}
    assert block_activations().at(SIZES) == 34 * sbh + 5 * A * S * S * B


@pytest.mark.parametrize(
    ("options", "one", "many"),
    [
        ({}, "34sbh + 5as²b", "10sbh + 24sbh/t + 5as²b/t"),
        ({"recompute": "selective"}, "34sbh", "10sbh + 24sbh/t"),
        ({"recompute": "selective:op"}, "18sbh", "2sbh + 16sbh/t"),
        ({"recompute": "selective:mlp,layernorm"}, "14sbh + 5as²b", "6sbh + 8sbh/t + 5as²b/t"),
        ({"recompute": "full"}, "2sbh", "2sbh"),
        ({"recompute": "full", "partitioned": True}, "2sbh", "2sbh/t"),
        ({"recompute": "full", "on_host": True}, "0", "0"),
        ({"sequence_parallel": True}, "34sbh + 5as²b", "34sbh/t + 5as²b/t"),
        ({"sequence_parallel": True, "keep_gathered": True}, "34sbh + 5as²b", "4sbh + 30sbh/t + 5as²b/t"),
    ],
)
def test_what_a_block_keeps_in_letters(options: dict[str, Any], one: str, many: str) -> None:
    form = block_activations(**options).where(f=4 * symbol("h"))
    assert (str(form.where(t=1)), str(form)) == (one, many)


def test_traffic_of_parallel_layers_in_letters() -> None:
    blocks = {"l": 24, "r": 24, "first": 1, "last": 1, "m": 2, "v": 2, "start": 1, "end": 0}
    tensor, cut = formulas.tensor_parallel("full"), formulas.sequence_parallel("selective:mlp")
    assert str(tensor["all_reduce"].elements.where(blocks)) == "584bsh + 12bs"
    assert [str(form.elements.where(blocks)) for form in cut.values()] == ["342bsh", "196bsh", "12bs"]
    assert tensor["all_reduce"].at(blocks, t=4, bsh=80, bs=10, w=2, c=4) == Fraction(3, 4) * (584 * 160 + 12 * 40)
    assert str(formulas.boundary_sends("1f1b", divided=True).elements.where(blocks)) == "6bsh/t"
    assert str(formulas.boundary_sends("zb-v").elements.where(blocks)) == "4bsh"
    assert str(formulas.shared_grads(copies=2).elements) == "2S/N + 2C/N"
    assert str(formulas.tied_grads(passes=2, divided=False).elements) == "4E"
    assert str(formulas.inputs_moved(divided=True).elements) == "rmbsh/t"


@pytest.mark.parametrize(
    ("schedule", "live", "bubble"),
    [
        ("gpipe", "m", "(p-1)/m"),
        ("1f1b", "min(m, p-i)", "(p-1)/m"),
        ("interleaved", "min(2(p-i-1)+(v-1)p+1, vm)", "(p-1)/(vm)"),
        ("zb-h1", "min(m, p-i)", "(p-1)/(3m)"),
        ("zb-v", "2p", "(p-1)/(6m)"),
    ],
)
def test_pipelines_in_letters(schedule: str, live: str, bubble: str) -> None:
    assert (str(formulas.live_micro_batches(schedule)), str(formulas.bubble(schedule))) == (live, bubble)


def test_numbers_put_in() -> None:
    held = {"Ψ": 7_500_000_000, "N": 64, "w": 2, "g": 2}
    assert model_states(3, MIXED)["optim"].numbers(held) == "12 · 7,500,000,000 / 64"
    assert volume(3).params.numbers(held) == "63/64 · 2 · 7,500,000,000 · 2"
    assert formulas.bubble("interleaved").numbers({"p": 4, "v": 2, "m": 8}) == "3 / 2 / 8"


@pytest.mark.parametrize("letter", [*LETTERS])
def test_the_glossary_has_each_letter_with_its_words(letter: str) -> None:
    page = (Path(__file__).parents[2] / "docs/glossary.md").read_text(encoding="utf-8")
    assert f"| {letter} | {LETTERS[letter].unit} | {LETTERS[letter].meaning} |" in page


@pytest.mark.parametrize("t", [1, 8])
def test_rows_of_table_2_of_2205_05198(t: int) -> None:
    """Bytes per block over sbh, written as that table writes them."""
    sbh, scores = S * B * H, Fraction(5 * A * S, H)

    def per(recompute: str = "none", sequence_parallel: bool = False) -> Fraction:
        return block_activations(recompute, sequence_parallel=sequence_parallel).at(SIZES, t=t) / sbh

    assert per() == 10 + Fraction(24, t) + scores / t
    assert per(sequence_parallel=True) == Fraction(34, t) + scores / t
    assert per("selective") == 10 + Fraction(24, t)
    assert per("selective", True) == Fraction(34, t)
    assert per("full") == 2


def test_another_width_of_the_mlp_is_megatrons_estimator() -> None:
    """(18 + 4 ffn/h) sbh without the scores (theoretical_memory_usage.py)."""
    for ffn in (4 * H, 3 * H, 5504):
        kept = block_activations("selective").at(SIZES, f=ffn)
        assert kept == S * B * H * (18 + Fraction(4 * ffn, H))


@pytest.mark.parametrize(
    ("heads", "hidden", "ratio", "saved"),
    [(96, 12288, 80, "0.702"), (128, 20480, 64, "0.653")],
    ids=["GPT-3", "MT-NLG"],
)
def test_what_selective_recompute_saves(heads: int, hidden: int, ratio: int, saved: str) -> None:
    """5as/h = 80 and 64; 70.2% and 65.3% of the activations."""
    sizes = {"s": 2048, "b": 1, "h": hidden, "a": heads, "f": 4 * hidden, "t": 1}
    whole, kept = block_activations().at(sizes), block_activations("selective").at(sizes)
    assert (whole - kept) / (2048 * hidden) == ratio
    assert f"{float(1 - kept / whole):.3f}" == saved


def test_the_zero_papers_estimate() -> None:
    """GPT-2 1.5B: about 60 GB; its 100B example: 33.55e9 elements of checkpoints, "around 60 GB" in fp16."""
    assert 2 * formulas.zero_paper_elements().at(SIZES, l=48) == 60_397_977_600
    assert 2 * formulas.checkpoint_elements().at(s=1024, b=32, h=8192, l=125) == 67_108_864_000
    assert 48 * block_activations().at(SIZES) > 4 * 60_397_977_600  # 286.9 GB: why a text is due
    assert "scores" in formulas.WHY_ESTIMATES_DIFFER


# -- parameters ------------------------------------------------------------------------
def gpt2_parameters(
    layers: int, hidden: int, vocab: int, positions: int, *, ffn: int | None = None, tied: bool = True
) -> int:
    return decoder_parameters(
        layers,
        hidden,
        4 * hidden if ffn is None else ffn,
        vocab,
        queries=hidden,
        keys=hidden,
        gated=False,
        biases=(True, True, True, True),
        norms=2,
        norm_params=2,
        positions=positions,
        tied=tied,
    )


def llama_parameters(
    layers: int, hidden: int, ffn: int, vocab: int, heads: int, kv_heads: int | None = None, *, tied: bool = False
) -> int:
    return decoder_parameters(
        layers,
        hidden,
        ffn,
        vocab,
        queries=hidden,
        keys=hidden * (kv_heads or heads) // heads,
        gated=True,
        biases=(False, False, False, False),
        norms=2,
        norm_params=1,
        tied=tied,
    )


def test_gpt2_sizes() -> None:
    """What the released checkpoints hold: 124,439,808 to 1,557,611,200."""
    sizes = [(12, 768), (24, 1024), (36, 1280), (48, 1600)]
    assert [gpt2_parameters(layers, h, 50257, 1024) for layers, h in sizes] == [
        124_439_808, 354_823_168, 774_030_080, 1_557_611_200,
    ]  # fmt: skip
    tied, untied = (gpt2_parameters(12, 768, 50257, 1024, tied=tied) for tied in (True, False))
    assert untied - tied == 50257 * 768


def test_gpt2_in_one_line() -> None:
    layers, h, v, s = 5, 96, 300, 64
    assert gpt2_parameters(layers, h, v, s) == 12 * layers * h**2 + 13 * layers * h + (v + s) * h + 2 * h
    assert megatron_parameters(layers, h, v, s) == gpt2_parameters(layers, h, v, s) - 2 * h
    one_more = gpt2_parameters(layers, h, v, s, ffn=4 * h + 1) - gpt2_parameters(layers, h, v, s)
    assert one_more == layers * (2 * h + 1)


def test_llama_sizes() -> None:
    """Llama 2 7B and 70B, Llama 3 8B (8 of 32 heads for keys and values), Llama 3.2 1B (tied)."""
    assert llama_parameters(32, 4096, 11008, 32000, 32) == 6_738_415_616
    assert llama_parameters(80, 8192, 28672, 32000, 64, 8) == 68_976_648_192
    assert llama_parameters(32, 4096, 14336, 128256, 32, 8) == 8_030_261_248
    assert llama_parameters(16, 2048, 8192, 128256, 32, 8, tied=True) == 1_235_814_400


@pytest.mark.parametrize(
    ("layers", "hidden", "billions"), [(24, 2304, "1.7"), (30, 3072, "3.6"), (36, 4096, "7.5"), (128, 25600, "1008.0")]
)
def test_megatrons_table_1(layers: int, hidden: int, billions: str) -> None:
    """Vocabulary 51,200 and 2,048 positions; 1.65 is printed 1.7."""
    exact = megatron_parameters(layers, hidden, 51_200, 2_048) / GB
    assert f"{float(exact):.1f}" == billions
    assert twelve_l_h_squared(layers, hidden) < exact * GB


# -- calculators that disagree ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("ZeRO paper", ("120.0", "31.4", "16.6", "1.9")),
        ("DeepSpeed estimator, code", (None, None, "17.1", "2.1")),
        ("DeepSpeed estimator, docs", (None, None, "31.9", "2.1")),
        ("EleutherAI cookbook", ("135.0", "47.4", "17.9", "5.1")),
        ("llm-analysis", ("135.0", "46.4", "16.9", "2.1")),
        ("Megatron-LM theoretical", ("135.0", "46.4", None, None)),
        ("mlsysim 0.3.0", ("120.8", "32.2", "16.7", "1.9")),
        ("accelerate estimate-memory", ("60.0", "60.0", "60.0", "60.0")),
    ],
)
def test_calculators_on_the_same_question(name: str, shown: tuple[str | None, ...]) -> None:
    """7.5B parameters on 64 ranks, GB: read in each one's source."""
    found = {calculator.name: calculator for calculator in formulas.calculators()}
    assert len(found) == 8
    values = [found[name].model_states(stage, 7_500_000_000, 64) for stage in range(4)]
    rounded = [None if value is None else f"{float(value) / GB:.1f}" for value in values]
    assert tuple(rounded) == shown
    assert found[name].source
    assert found[name].counts


def test_the_largest_layer_counts_where_a_calculator_gathers_it() -> None:
    added = {
        c.name
        for c in formulas.calculators()
        if c.model_states(3, GB, 8, largest_layer=10**6) != c.model_states(3, GB, 8)
    }
    assert added == {"DeepSpeed estimator, code", "DeepSpeed estimator, docs"}


def test_deepspeeds_estimate_of_t5_3b() -> None:
    """2851M parameters on 8 ranks: 11.28 GiB by its code, 15.93 in its docs' sample output."""
    found = {calculator.name: calculator for calculator in formulas.calculators()}
    sizes = [found[f"DeepSpeed estimator, {kind}"].model_states(2, 2_851_000_000, 8) for kind in ("code", "docs")]
    assert [f"{float(size or 0) / 2**30:.2f}" for size in sizes] == ["11.28", "15.93"]


LLAMA, WORDS = 8_030_261_248, 525_336_576
"""Llama 3 8B: its parameters, and those of its largest module, the table of words."""


@pytest.mark.parametrize(
    ("estimate", "host", "gpu"),
    [
        (formulas.deepspeed_stage_2(LLAMA, 8), 385_452_539_904, 16_060_522_496),
        (formulas.deepspeed_stage_2(LLAMA, 8, cpu_offload=False), 385_452_539_904, 34_128_610_304),
        (formulas.deepspeed_stage_3(LLAMA, WORDS, 8), 216_817_053_696, 2_101_346_304),
        (formulas.deepspeed_stage_3(LLAMA, WORDS, 8, cpu_offload_params=False), 192_726_269_952, 4_108_911_616),
        (formulas.deepspeed_stage_3(LLAMA, WORDS, 8, cpu_offload=False), 25_216_155_648, 20_169_434_112),
        (
            formulas.deepspeed_stage_3(LLAMA, WORDS, 8, cpu_offload=False, zero_init=False),
            385_452_539_904,
            20_169_434_112,
        ),
        (formulas.deepspeed_stage_3(LLAMA, WORDS, 8, 4), 54_204_263_424, 2_101_346_304),
    ],
)
def test_deepspeeds_estimates_of_llama_3_8b(estimate: formulas.Estimate, host: int, gpu: int) -> None:
    """As deepspeed 0.19.8's functions returned them."""
    assert estimate == (host, gpu)


def test_accelerates_estimates_of_llama_3_8b() -> None:
    """As accelerate 1.15's function returned them: 16 bytes a parameter, 8 in float16, none in int8."""
    found = {dtype: max(formulas.accelerate_training(4 * LLAMA, dtype).values()) for dtype in ("float32", "float16")}
    assert found == {"float32": 128_484_179_968, "float16": 64_242_089_984}
    assert set(formulas.accelerate_training(4 * LLAMA, "int8").values()) == {-1}
