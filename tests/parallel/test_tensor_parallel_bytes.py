"""What tensor and sequence parallelism send and keep, counted, beside closed forms written out here, `==`.

s tokens, b rows, h width, a heads, L layers, t tensor-parallel ranks, A microbatches. Half types: 2 bytes an element.
Sources: 1909.08053 section 3; 2205.05198 sections 4 and 5 and Table 2.
"""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from functools import cache
from typing import Any

import pytest

from zerosim.analysis.formulas import block_activations
from zerosim.config import RunConfig
from zerosim.ledger.activations import SavedRow
from zerosim.train.plan import plan
from zerosim.train.result import RunResult

s, b, h, a, L, V, A = 16, 3, 32, 4, 3, 64, 2
SIZES: dict[str, Any] = dict(layers=L, hidden=h, heads=a, seq=s, vocab=V, micro_batch=b, accumulate=A)
MEGATRON: dict[str, Any] = dict(precision="bf16", saves="megatron", dropout=0.1, steps=1)
SP: dict[str, Any] = dict(sequence_parallel=True)
KEEP: dict[str, Any] = dict(sequence_parallel=True, keep_gathered=True)
TENSORS = pytest.mark.parametrize("t", [2, 4])
RECOMPUTES = pytest.mark.parametrize("recompute", ["none", "selective", "full"])


@cache
def planned(t: int, ranks: int, options: str) -> RunResult:
    return plan(RunConfig(**{**SIZES, **MEGATRON, "stage": 0, **json.loads(options), "ranks": ranks, "tp": t}))


def counted(t: int, /, data_ranks: int = 1, **options: Any) -> RunResult:
    return planned(t, data_ranks * t, json.dumps(options))


def calls(result: RunResult, purpose: str = "activations", dtype: str = "bf16") -> Counter[str]:
    """Rank 0's calls along tp, by op."""
    found: Counter[str] = Counter()
    for row in result.traffic[0]:
        if (row.purpose, row.dtype, row.axis) == (purpose, dtype, "tp"):
            found[row.op] += row.calls
    return found


def sent(result: RunResult, purpose: str = "activations", dtype: str = "bf16") -> int:
    rows = (row for row in result.traffic[0] if (row.purpose, row.dtype, row.axis) == (purpose, dtype, "tp"))
    return sum(row.wire_bytes for row in rows)


# -- traffic --------------------------------------------------------------------------------------------
@TENSORS
@RECOMPUTES
@pytest.mark.parametrize("model", [dict(), dict(model="llama", kv_heads=2, dropout=0.0)], ids=["gpt", "llama"])
def test_tensor_parallelism_sends_its_all_reduces(t: int, recompute: str, model: dict[str, Any]) -> None:
    """4 of b s h for a layer and microbatch, 6 with full recompute; 1 for the table, 1 for the head."""
    result = counted(t, recompute=recompute, **model)
    each = 6 if recompute == "full" else 4
    number = A * (each * L + 2)
    assert calls(result) == {"all_reduce": number}
    assert sent(result) * t == number * 2 * (t - 1) * b * s * h * 2
    assert calls(result, dtype="fp32") == {"all_reduce": A * 3}  # top, target's logit, sum of exponentials
    assert sent(result, dtype="fp32") * t == A * 3 * 2 * (t - 1) * b * s * 4
    assert {row.purpose for row in result.traffic[0] if row.axis != "tp"} == {"states"}


@TENSORS
@RECOMPUTES
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("model", [dict(), dict(model="llama", kv_heads=2, dropout=0.0)], ids=["gpt", "llama"])
def test_sequence_parallelism_gathers_and_scatters(t: int, recompute: str, kept: bool, model: dict[str, Any]) -> None:
    """6 + 4 for a layer and microbatch, 10 b s h (t-1)/t elements; 8 + 6 with full recompute. Kept inputs: 4 + 4, and
    6 + 6. The table is scattered and its gradient gathered; the head's input is gathered, again where it was not kept,
    and its gradient scattered."""
    result = counted(t, recompute=recompute, **model, **(KEEP if kept else SP))
    full, again = 2 if recompute == "full" else 0, 0 if kept else 1
    number = {"all_gather": A * ((4 + 2 * again + full) * L + 2 + again), "reduce_scatter": A * ((4 + full) * L + 2)}
    assert calls(result) == number
    assert sent(result) * t == sum(number.values()) * (t - 1) * b * s * h * 2
    if recompute == "none" and not kept:
        extras = A * 5
        assert (sum(number.values()) - extras) // (A * L) == 10
    assert calls(result, dtype="fp32") == {"all_reduce": A * 3}


def test_shares_of_gradients_are_added_once_a_step() -> None:
    """Norms, positions and row-parallel biases with sequence parallelism; without, nothing is summed."""
    assert calls(counted(4), purpose="states") == {}
    summed = L * (4 * h + 2 * h) + 2 * h + s * h
    for t in (2, 4):
        result = counted(t, **SP)
        assert calls(result, purpose="states") == {"all_reduce": L + 2}
        assert sent(result, purpose="states") * t == 2 * (t - 1) * summed * 2
        sharded = counted(t, data_ranks=2, stage=3, **SP)  # of its own slices alone, rank 0's and 1's together
        both = [
            sum(row.payload_bytes for row in sharded.traffic[rank] if (row.axis, row.purpose) == ("tp", "states"))
            for rank in (0, t)
        ]
        assert sum(both) == summed * 2


def test_heads_that_several_ranks_hold_are_added_over_those() -> None:
    """K key-value heads on t ranks: t / K neighbours add up their k_proj and v_proj, and nobody else."""
    llama: dict[str, Any] = dict(model="llama", heads=8, hidden=64, layers=1, dropout=0.0)
    for t, kv_heads in ((4, 2), (8, 2), (8, 1), (4, 4), (2, 4)):
        result = counted(t, kv_heads=kv_heads, **llama)
        sharing = max(1, t // kv_heads)
        rows = [row for row in result.traffic[0] if (row.axis, row.purpose) == ("tp", "states")]
        elements = 2 * 64 * (64 // 8)
        assert sum(row.payload_bytes for row in rows) == (elements * 2 if sharing > 1 else 0)
        assert sum(row.wire_bytes for row in rows) * sharing == 2 * (sharing - 1) * sum(r.payload_bytes for r in rows)


@pytest.mark.parametrize("axes", [dict(stage=3), dict(stage=2, dp_replicate=2), dict(stage=1)], ids=str)
def test_data_axes_carry_a_tensor_parallel_ranks_part(axes: dict[str, Any]) -> None:
    """ZeRO's volume of the local Psi, and nothing of another kind along tp."""
    t, n = 2, 4
    result = counted(t, data_ranks=n, **axes)
    replicas = axes.get("dp_replicate", 1)
    shards, layout = n // replicas, result.layout
    local = sum(flat.numel for flat in layout.flats.values())
    table = layout.flats["wte"].numel
    psi = 12 * h * h * L + V * h
    assert local * t == psi + 7 * h * L + t * (6 * h * L + 2 * h + s * h)
    inside = {1: 2 * local, 2: (A + 1) * local, 3: (3 * A) * local + 2 * A * table}[axes["stage"]]
    found = [row for row in result.traffic[0] if row.purpose == "states" and row.axis == "dp_shard"]
    assert sum(row.wire_bytes for row in found) * shards == inside * (shards - 1) * 2


# -- activations ----------------------------------------------------------------------------------------
def kept_by(result: RunResult, unit: str = "h.0") -> int:
    return sum(row.nbytes for row in result.saved[unit])


FORMS: dict[tuple[str, bool], Any] = {
    ("none", False): lambda t: s * b * h * (10 + Fraction(24, t) + Fraction(5 * a * s, h * t)),
    ("none", True): lambda t: Fraction(s * b * h, t) * (34 + Fraction(5 * a * s, h)),
    ("selective", False): lambda t: s * b * h * (10 + Fraction(24, t)),
    ("selective", True): lambda t: Fraction(34 * s * b * h, t),
    ("full", False): lambda t: Fraction(2 * s * b * h),
    ("full", True): lambda t: Fraction(2 * s * b * h, t),
    ("selective:layernorm", False): lambda t: 6 * s * b * h + Fraction(24 * s * b * h + 5 * a * s * s * b, t),
    ("selective:layernorm", True): lambda t: Fraction(30 * s * b * h + 5 * a * s * s * b, t),
    ("selective:core_attn,mlp", False): lambda t: 10 * s * b * h + Fraction(8 * s * b * h, t),
    ("selective:mlp_act,dropout", True): lambda t: Fraction(24 * s * b * h + 5 * a * s * s * b, t),
    ("selective:op", False): lambda t: 2 * s * b * h + Fraction(16 * s * b * h, t),
    ("selective:op", True): lambda t: Fraction(18 * s * b * h, t),
}
"""Table 2 of 2205.05198: bytes that a layer keeps for backward, by recompute and whether rows are cut; and what is left
of that where parts run again."""


@TENSORS
@pytest.mark.parametrize(("recompute", "cut"), FORMS, ids=str)
def test_a_layer_keeps_its_closed_form(t: int, recompute: str, cut: bool) -> None:
    """By what ops declared, and by what was live when forward had ended; the same on every rank."""
    options: dict[str, Any] = dict(recompute=recompute, accumulate=1, **(SP if cut else {}))
    result, expected = counted(t, **options), FORMS[recompute, cut](t)
    live = result.memory[0].marks["end_of_forward"].by_unit
    for i in range(L):
        assert kept_by(result, f"h.{i}") == expected
        assert live.get((f"h.{i}", "activation"), 0) + live.get((f"h.{i}", "kept"), 0) == expected
        assert live.get((f"h.{i}", "temp"), 0) == 0
    assert len(result.ran) == 1
    assert result.live_bytes_after == [0] * t
    form = block_activations(recompute, sequence_parallel=cut)
    assert form.at(s=s, b=b, h=h, a=a, f=4 * h, t=t) == expected


@TENSORS
def test_every_op_of_a_block_stands_with_its_bytes(t: int) -> None:
    sbh, score = s * b * h, a * s * s * b
    rows = counted(t, **SP).saved["h.1"]
    assert rows == (
        SavedRow("ln_1", "input", 2 * sbh // t),
        SavedRow("attn.c_attn", "input", 2 * sbh // t),
        SavedRow("attention", "q, k, v", 6 * sbh // t),
        SavedRow("attention", "softmax", 2 * score // t),
        SavedRow("attention", "mask", score // t),
        SavedRow("attention", "dropped softmax", 2 * score // t),
        SavedRow("attn.c_proj", "input", 2 * sbh // t),
        SavedRow("resid_1", "mask", sbh // t),
        SavedRow("ln_2", "input", 2 * sbh // t),
        SavedRow("mlp.c_fc", "input", 2 * sbh // t),
        SavedRow("gelu", "input", 8 * sbh // t),
        SavedRow("mlp.c_proj", "input", 8 * sbh // t),
        SavedRow("resid_2", "mask", sbh // t),
    )
    whole = {"ln_1", "attn.c_attn", "resid_1", "ln_2", "mlp.c_fc", "resid_2"}
    for one, cut in zip(counted(t).saved["h.1"], rows, strict=True):
        assert one[:2] == cut[:2]
        assert one.nbytes == cut.nbytes * (t if one.op in whole else 1)


@TENSORS
def test_beside_layers_a_model_keeps_its_extras(t: int) -> None:
    """2205.05198, section 4.3, at p = 1: the embedding's dropout s b h / t, the final norm's and the head's inputs
    2 s b h / t each. The paper's logits are fp32 and kept; here they have the run's type and end with the loss."""
    for options, cut in ((SP, t), ({}, 1)):
        saved = counted(t, **options).saved
        assert {(row.op, row.what): row.nbytes * cut for row in saved["wpe"]} == {("embd", "mask"): s * b * h}
        assert {(row.op, row.what): row.nbytes * cut for row in saved["ln_f"]} == {("ln_f", "input"): 2 * s * b * h}
        assert {(row.op, row.what): row.nbytes * cut for row in saved["lm_head"]} == {("wte", "input"): 2 * s * b * h}


# -- the paper's models ---------------------------------------------------------------------------------
KOR: dict[str, tuple[int, int, int, int, int, int]] = {
    "22B": (64, 6144, 48, 4, 1, 1),
    "175B": (96, 12288, 96, 1, 8, 3),
    "530B": (128, 20480, 105, 1, 35, 3),
    "1T": (160, 25600, 128, 1, 64, 1),
}
"""Table 3 of 2205.05198: heads, width, layers, microbatch, p and v; 2,048 tokens, a vocabulary of 51,200, t = 8."""
GIB = {
    "22B": (59.25, 9.5625),
    "175B": (66.84375, 12.3515625),
    "530B": (114.0234375, 23.076171875),
    "1T": (131.25, 26.5625),
}
"""Activations of the first stage: tp alone without recompute; sequence parallelism and selective recompute."""


@cache
def layer_of_kor(name: str, recompute: str, cut: bool) -> int:
    heads, width, _, rows, *_ = KOR[name]
    sizes: dict[str, Any] = dict(layers=1, hidden=width, heads=heads, seq=2048, vocab=51200, micro_batch=rows)
    config = RunConfig(**sizes, **MEGATRON, recompute=recompute, stage=0, ranks=8, tp=8, sequence_parallel=cut)
    return kept_by(plan(config))


def layers_held(name: str) -> int:
    """How many layers' activations the first stage of 1F1B holds at its peak: L for any p; interleaved, p - 1 chunks of
    L / (p v) layers more (section 4.2.3 of 2205.05198)."""
    layers, _, p, v = KOR[name][2:]
    return layers if v == 1 else layers // (p * v) * (p * v + p - 1)


@pytest.mark.parametrize("name", KOR)
def test_the_papers_first_stages_to_the_byte(name: str) -> None:
    """One layer is counted, of the paper's size; every layer keeps as much."""
    layers = layers_held(name)
    found = [layers * layer_of_kor(name, *how) for how in (("none", False), ("selective", True))]
    assert found == [gib * 2**30 for gib in GIB[name]]
