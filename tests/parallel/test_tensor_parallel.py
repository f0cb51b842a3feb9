"""Tensor and sequence parallelism train what one rank trains, whatever else is cut: values, bits, and what goes wrong.

A mesh is compared with one rank on the same global batch, `ROWS` rows.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from poisoned import poisoned
from same import assert_close, assert_same_training
from test_schedule import run_with

from zerosim.config import RunConfig
from zerosim.errors import NonFiniteGradient
from zerosim.parallel.base import Strategy
from zerosim.parallel.ddp import DDP
from zerosim.parallel.zero3 import Zero3
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

ROWS = 4
SMALL: dict[str, Any] = dict(layers=1, hidden=16, heads=4, seq=8, vocab=256, steps=2, precision="fp64", seed=3)
SP: dict[str, Any] = dict(sequence_parallel=True)
KEEP: dict[str, Any] = dict(sequence_parallel=True, keep_gathered=True)


def mesh_of(ranks: int, **axes: Any) -> dict[str, Any]:
    return dict(ranks=ranks, **axes)


def trained(**changes: Any) -> RunResult:
    """A run on ROWS rows, however they are dealt."""
    fields = {**SMALL, "stage": 0, **changes}
    fields.setdefault("micro_batch", ROWS * fields.get("tp", 1) // (fields["ranks"] * fields.get("accumulate", 1)))
    return run(RunConfig(**{name: value for name, value in fields.items() if value is not None}))


@cache
def alone(options: tuple[tuple[str, Any], ...]) -> RunResult:
    return trained(ranks=1, **dict(options))


# -- values ---------------------------------------------------------------------------------------------
LLAMA: dict[str, Any] = dict(model="llama", heads=4)
FLAT: dict[str, Any] = dict(model="flat", layers=None, hidden=None, heads=None)
MODELS: dict[str, dict[str, Any]] = {
    "gpt": dict(clip_norm=0.5),
    "untied": dict(tie_embeddings=False, optimizer="adamw"),
    "a narrow feed-forward": dict(ffn=20, hidden=24),
    "full recompute": dict(recompute="full", saves="megatron"),
    "selective": dict(recompute="selective"),
    "flash": dict(attention="flash"),
    "padded": dict(vocab=257, pad_vocab=True),
    "padded and untied": dict(vocab=259, pad_vocab=True, tie_embeddings=False),
    "llama, 4 key heads": dict(LLAMA, kv_heads=4),
    "llama, 2 key heads": dict(LLAMA, kv_heads=2, clip_norm=0.5),
    "llama, 1 key head": dict(LLAMA, kv_heads=1, recompute="full"),
    "llama, flash, padded": dict(LLAMA, kv_heads=2, attention="flash", vocab=261, pad_vocab=True),
    "flat, nothing divides": dict(FLAT, params=1001, units=3, clip_norm=0.01),
    "flat, fewer than ranks": dict(FLAT, params=7, units=3),
}
MESHES: list[dict[str, Any]] = [mesh_of(2, tp=2), mesh_of(4, tp=4, stage=1, **SP), mesh_of(4, tp=2, stage=3, **SP)]
OF_EIGHT: list[dict[str, Any]] = [mesh_of(8, tp=4, stage=2), mesh_of(8, tp=2, dp_replicate=2, stage=3, **KEEP)]
MORE_MESHES: list[dict[str, Any]] = [
    *OF_EIGHT,
    mesh_of(4, tp=4),
    mesh_of(4, tp=2, stage=1),
    mesh_of(8, tp=2, stage=2, **SP),
    mesh_of(8, tp=4, stage=3, **KEEP),
    mesh_of(8, tp=2, dp_replicate=2, stage=2, accumulate=1, replica_reduction="micro_batch"),
    mesh_of(8, tp=2, dp_replicate=4, stage=1, **SP),
    mesh_of(4, tp=2, stage=3, partition="owner", **KEEP),
    mesh_of(4, tp=2, stage=2, accumulate=2, **SP),
    mesh_of(2, tp=2, accumulate=4),
    mesh_of(4, tp=4, collective="ring", **SP),
]


def fitted(model: str, mesh: dict[str, Any]) -> dict[str, Any]:
    """A mesh as this model can be put on it: `flat` has no rows to cut."""
    return {name: value for name, value in mesh.items() if MODELS[model].get("model") != "flat" or name not in KEEP}


def check_mesh(model: str, mesh: dict[str, Any]) -> None:
    options = MODELS[model]
    expected = alone(tuple((name, value) for name, value in options.items() if name != "pad_vocab"))
    assert_close(trained(**options, **fitted(model, mesh)), expected, 1e-11)
    if "clip_norm" in options:
        assert any(step.grad_norm > options["clip_norm"] for step in expected.steps)


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", MODELS)
def test_a_mesh_trains_what_one_rank_trains(model: str) -> None:
    for mesh in MESHES:
        check_mesh(model, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_more_meshes_do(model: str) -> None:
    """Every second one, from the first or from the second: a mesh meets seven models, a model six meshes."""
    for mesh in MORE_MESHES[list(MODELS).index(model) % 2 :: 2]:
        check_mesh(model, mesh)


DROPS = [dict(), dict(attention="flash"), dict(recompute="full"), dict(recompute="selective", saves="megatron")]


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", DROPS, ids=str)
def test_dropout_is_that_of_one_rank(options: dict[str, Any]) -> None:
    """At the same microbatches: masks are windows of the whole's, by head, by row."""
    options = {**options, "dropout": 0.3, "seq": 12}
    expected = alone(tuple(options.items()))
    for mesh in (mesh_of(4, tp=4), mesh_of(2, tp=2, **SP)):
        assert_close(trained(**options, **mesh), expected, 1e-11)
    two = trained(ranks=2, accumulate=2, **options)
    assert_close(trained(accumulate=2, **options, **mesh_of(4, tp=2, stage=3, **SP)), two, 1e-11)


@pytest.mark.quick(1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_types_are_within_their_rounding(precision: str) -> None:
    """Activations and partial sums are rounded to 8 (11) bits at other places: two last places of the loss."""
    rounding = {"bf16": 2.0**-7, "fp16": 2.0**-10}[precision]
    options = dict(precision=precision, steps=3)
    expected = alone(tuple(options.items()))
    for mesh in (mesh_of(2, tp=2), mesh_of(4, tp=4, stage=1, **SP), mesh_of(4, tp=2, stage=3, **KEEP)):
        result = trained(**options, **mesh)
        np.testing.assert_allclose(result.mean_losses, expected.mean_losses, rtol=rounding, atol=0)


# -- bits -----------------------------------------------------------------------------------------------
ZERO = [(0, "slices"), *[(stage, partition) for stage in (1, 2, 3) for partition in ("slices", "owner")]]
BITS: list[dict[str, Any]] = [
    dict(precision="bf16", clip_norm=0.5, **SP),
    dict(precision="fp32", dropout=0.1, hidden=20),
    dict(LLAMA, kv_heads=1, precision="bf16", clip_norm=0.5, **KEEP),
]


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize("options", BITS, ids=str)
def test_stages_and_partitions_of_one_mesh_are_equal_to_the_bit(options: dict[str, Any]) -> None:
    first, *others = [
        trained(stage=stage, partition=partition, **mesh_of(4, tp=2), **options) for stage, partition in ZERO
    ]
    if "clip_norm" in options:
        assert any(step.grad_norm > options["clip_norm"] for step in first.steps)
    for other in others:
        assert_same_training(other, first)


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize("options", [dict(), SP, KEEP], ids=["tp", "sp", "kept"])
def test_recompute_and_what_is_kept_change_no_bit(options: dict[str, Any]) -> None:
    mesh = mesh_of(4, tp=2, stage=3, precision="bf16", dropout=0.1, **options)
    plain = trained(**mesh)
    for recompute in ("full", "selective"):
        assert_same_training(trained(recompute=recompute, **mesh), plain)
    if options is SP:
        assert_same_training(trained(**{**mesh, **KEEP}), plain)


@pytest.mark.bits
def test_a_table_of_padding_changes_no_bit() -> None:
    """Where the table divides by 128 t already there is none, and the flag says nothing."""
    assert_same_training(trained(**mesh_of(2, tp=2, pad_vocab=True)), trained(**mesh_of(2, tp=2)))


# -- loss scaling, blame --------------------------------------------------------------------------------
OWN = "h.1.attn.c_attn.weight"  # early in what a rank holds, and its own


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", [dict(), SP], ids=["tp", "sp"])
@pytest.mark.parametrize(("stage", "kind"), [(0, DDP), (3, Zero3)])
def test_a_bad_gradient_is_blamed_on_its_rank(stage: int, kind: type[Strategy], options: dict[str, Any]) -> None:
    with pytest.raises(NonFiniteGradient, match=r"rank 3's gradient of h\.1 is not finite at step 1:") as raised:
        run_with(poisoned(kind, 3, "h.1", weight=OWN), ranks=4, tp=2, stage=stage, seq=8, heads=2, **options)
    assert raised.value.rank == 3


@pytest.mark.parametrize(("stage", "kind"), [(0, DDP), (3, Zero3)])
def test_an_overflow_on_one_rank_skips_everywhere(stage: int, kind: type[Strategy]) -> None:
    """Step 1 is skipped by both tensor-parallel ranks: else the weights that both hold would differ, and be refused."""
    fields = dict(ranks=4, tp=2, stage=stage, seq=8, heads=2, precision="fp16", steps=3, initial_scale_power=4)
    result = run_with(poisoned(kind, 1, "h.1", np.inf, weight=OWN), **fields, hysteresis=1)
    assert [step.skipped for step in result.steps] == [False, True, False]
    assert [step.loss_scale for step in result.steps][1:] == [16.0, 8.0]


# -- whole models in files, text ------------------------------------------------------------------------
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "options",
    [dict(vocab=256), dict(vocab=257, pad_vocab=True), dict(LLAMA, kv_heads=1), dict(FLAT, params=103, units=2)],
    ids=["gpt", "padded", "llama", "flat"],
)
def test_weights_go_from_mesh_to_mesh(options: dict[str, Any], tmp_path: Path) -> None:
    """Files hold the whole, unpadded model by the names of one rank; without a step nothing changes."""
    single = {name: value for name, value in options.items() if name != "pad_vocab"}
    start = trained(ranks=1, steps=1, precision="fp32", **single)
    still_standing: dict[str, Any] = dict(precision="fp32", optimizer="sgd", lr=1e-300)
    np.savez(tmp_path / "w.npz", **start.weights)
    meshes: list[dict[str, Any]] = [mesh_of(4, tp=2, stage=3), mesh_of(4, tp=4), mesh_of(2, stage=1)]
    for mesh in meshes:
        padded = options if "tp" in mesh else single
        still = trained(weights=str(tmp_path / "w.npz"), steps=1, **still_standing, **padded, **mesh)
        assert still.weights.keys() == start.weights.keys()
        for name, values in start.weights.items():
            np.testing.assert_array_equal(still.weights[name], values, err_msg=name)
        np.savez(tmp_path / "w.npz", **still.weights)


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", [dict(), dict(LLAMA, kv_heads=2)], ids=["gpt", "llama"])
def test_text_is_the_same(options: dict[str, Any]) -> None:
    """From 3 bytes to more than fit: lengths that tp does not divide are padded behind, where nothing looks."""
    options = {**options, "sample": "abc", "sample_tokens": 7, "lr": 0.01}
    expected = trained(ranks=1, **options)
    assert len(expected.sample or "") > 0
    for mesh in (mesh_of(2, tp=2), mesh_of(4, tp=4, stage=3, **SP), mesh_of(4, tp=2, stage=3, **KEEP)):
        assert trained(**options, **mesh).sample == expected.sample
    vocab = {**options, "vocab": 261}
    assert trained(**vocab, **mesh_of(4, tp=4, pad_vocab=True, **SP)).sample == trained(ranks=1, **vocab).sample


def test_states_of_a_mesh_are_cut_by_tp_and_then_by_zero() -> None:
    """16 bytes a parameter of a block: norms, row biases and positions are whole on each tensor-parallel rank."""
    sizes = dict(layers=1, hidden=16, heads=4, seq=8, vocab=256, precision="bf16", micro_batch=1, steps=1)
    d, t = 16, 4
    cut, whole = 256 * d + 12 * d * d + 7 * d, 8 * d + 8 * d
    assert cut + whole == plan(RunConfig(ranks=1, stage=0, **sizes)).num_parameters
    for stage, ranks in ((0, 4), (3, 8)):
        held = plan(RunConfig(ranks=ranks, tp=t, stage=stage, **sizes)).memory[0].model_states()
        local = cut // t + whole
        assert sum(held.values()) == 16 * local // (ranks // t)
