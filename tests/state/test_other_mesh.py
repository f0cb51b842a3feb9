"""On another mesh: weights and states assemble to the same numbers, and the next steps have the bits that
docs/architecture.md promises ("What bits depend on")."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from random_configs import drawn
from saved import WAYS, assert_same_states, opened, resumed, saved, saved_again, states_of

from zerosim.config import RunConfig
from zerosim.errors import InputError, OutOfMemory, RankFailed
from zerosim.state.folder import step_folder
from zerosim.train.result import RunResult
from zerosim.train.run import Experiment, run
from zerosim.train.world import world_of

GPT: dict[str, Any] = dict(layers=4, hidden=8, heads=2, seq=8, vocab=258, micro_batch=1, steps=3)
MESHES: dict[str, dict[str, Any]] = {
    "one rank": dict(ranks=1, stage=0),
    "stage 0": dict(ranks=3, stage=0),
    "stage 1": dict(ranks=2, stage=1),
    "stage 2": dict(ranks=5, stage=2),
    "stage 3": dict(ranks=3, stage=3),
    "owner": dict(ranks=3, stage=2, partition="owner"),
    "replicas": dict(ranks=6, dp_replicate=2, stage=3),
    "tp": dict(ranks=4, tp=2, stage=1),
    "tp of a padded table": dict(ranks=4, tp=2, stage=3, pad_vocab=True, sequence_parallel=True),
    "pp": dict(ranks=4, pp=2, accumulate=2, stage=1),
    "interleaved": dict(ranks=2, pp=2, pipeline="interleaved", accumulate=2, stage=1),
    "zb-v": dict(ranks=2, pp=2, pipeline="zb-v", accumulate=4, stage=0),
    "tp and pp": dict(ranks=8, tp=2, pp=2, accumulate=2, stage=3),
    "cp": dict(ranks=4, cp=2, stage=3),
    "tiles": dict(ranks=2, stage=3, gather="module", tiles=2),
    "by module": dict(ranks=2, stage=3, gather="module", prefetch=1),
    "hpZ": dict(ranks=4, ranks_per_node=2, stage=3, secondary_shard=2),
    "small parameters resident": dict(ranks=3, stage=3, persistent_numel=100),
    "on the host": dict(ranks=2, stage=3, offload="optimizer=host,params=host"),
}
ADAMS = ("adam", "adamw", "lion", "radam", "sophia", "adagrad", "rmsprop", "sgd")
EXPERTS: dict[str, Any] = dict(
    model="llama", layers=2, hidden=16, heads=4, kv_heads=2, seq=8, vocab=256, experts=4, top_k=2, expert_ffn=12,
    micro_batch=1, bias_rate=0.05, steps=3,
)  # fmt: skip
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "one rank": dict(ranks=1, stage=0),
    "stage 2": dict(ranks=3, stage=2),
    "ep": dict(ranks=4, ep=2, stage=3),
    "an expert a rank": dict(ranks=4, ep=4, stage=1),
    "ep and pp": dict(ranks=4, ep=2, pp=2, accumulate=2, stage=1),
    "ep over tp": dict(ranks=4, ep=2, tp=2, etp=1, sequence_parallel=True, stage=1),
    "etp": dict(ranks=8, ep=2, tp=2, sequence_parallel=True, stage=3),
    "over cp": dict(ranks=4, cp=2, ep=4, stage=3),
    "owner": dict(ranks=4, ep=2, stage=2, partition="owner"),
}
LORA: dict[str, Any] = dict(GPT, lora_rank=2, lora_target="all-linear")
PAIRS = [
    *((GPT, MESHES[one], MESHES[other]) for one in MESHES for other in MESHES if one != other),
    *((EXPERTS, OF_EXPERTS[one], OF_EXPERTS[other]) for one in OF_EXPERTS for other in OF_EXPERTS if one != other),
]


def moved(
    model: Mapping[str, Any], there: Mapping[str, Any], here: Mapping[str, Any], folder: Path, rng: random.Random
) -> None:
    """Save on one mesh, save again on another, and compare all states."""
    how = rng.choice(WAYS if "offload" not in there else ("sharded", "async"))
    saved(RunConfig(**{**model, **there, "steps": 2}), folder / "there", 2, how)
    config = RunConfig(**{**model, **here}, resume=str(folder / "there"))
    again = saved_again(config, folder / "here", rng.choice(("sharded", "gathered")[: 1 + ("offload" not in here)]))
    assert_same_states(states_of(opened(folder / "there", 2)), states_of(again))


@pytest.mark.slow
@pytest.mark.parametrize("case", range(48))
def test_states_are_the_same_on_every_mesh(case: int, tmp_path: Path) -> None:
    rng = random.Random(f"pair {case}")
    while True:
        model, there, here = rng.choice(PAIRS)
        fields = {**(LORA if model is GPT and rng.random() < 0.2 else model), "optimizer": rng.choice(ADAMS)}
        fields |= dict(precision=rng.choice(("fp32", "bf16", "fp16")))
        fields |= dict(momentum=0.9) if fields["optimizer"] == "sgd" else {}
        try:
            for mesh in (there, here):
                checked({**fields, **mesh})
            break
        except InputError:
            continue
    moved(fields, there, here, tmp_path, rng)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("there", "here"),
    [("tp and pp", "stage 3"), ("stage 2", "tp of a padded table"), ("replicas", "owner"), ("tiles", "pp")],
)
def test_adam_s_states_are_the_same_on_another_mesh(there: str, here: str, tmp_path: Path) -> None:
    moved(GPT, MESHES[there], MESHES[here], tmp_path, random.Random(there))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("there", "here"), [("etp", "ep and pp"), ("an expert a rank", "ep over tp")])
def test_experts_and_their_biases_are_the_same_on_another_mesh(there: str, here: str, tmp_path: Path) -> None:
    moved(EXPERTS, OF_EXPERTS[there], OF_EXPERTS[here], tmp_path, random.Random(here))


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case > 0)) for case in range(42)])
def test_a_random_run_s_states_are_the_same_on_a_random_mesh(case: int, tmp_path: Path) -> None:
    rng = random.Random(f"mesh {case}")
    drives = tmp_path / "drives"
    drives.mkdir()
    fixed: dict[str, Any] = dict(save_state=str(tmp_path / "there"), nvme=str(drives), steps=2)
    while True:
        fields, config = drawn(rng, checked, **fixed, save_as=rng.choice(WAYS))
        try:
            run(config)
            break
        except (RankFailed, OutOfMemory):
            continue
    there, tp = opened(tmp_path / "there", 2), config.mesh.tp
    keeps_tp = bool(config.tuning.base) or config.optim.optimizer.startswith("adam8bit")
    here = on_another(rng, fields, (tp,) if keeps_tp else (1, 1, 2), tmp_path)
    if here is None:
        pytest.skip("no other mesh of thirty drawn ones has such a run")
    again = saved_again(
        here, tmp_path / "here", "sharded" if here.offload.is_on else rng.choice(("sharded", "gathered"))
    )
    assert_same_states(states_of(there), states_of(again))


def checked(fields: Mapping[str, Any]) -> RunConfig:
    config = RunConfig(**fields)
    Experiment(config)
    world_of(config)
    return config


KEPT = (
    *("model", "hidden", "layers", "heads", "optimizer", "precision", "steps", "resume", "freeze", "tp", "ranks"),
    *("stage", "base", "compress", "rounding", "lora_rank", "lora_target", "adapter_dtype", "delayed_update"),
)


def on_another(rng: random.Random, fields: dict[str, Any], tps: tuple[int, ...], folder: Path) -> RunConfig | None:
    """Return the same training on a random mesh, without options that do not go with that; None if none was found."""
    for _ in range(30):
        shards, pp, tp = rng.choice((1, 2, 3, 4)), rng.choice((1, 1, 2)), rng.choice(tps)
        mesh = dict(ranks=shards * pp * tp, pp=pp, tp=tp, dp_replicate=1, cp=1, stage=rng.randrange(4), steps=3)
        mesh |= dict(partition="owner") if rng.random() < 0.2 else {}
        mesh |= dict(accumulate=2 * pp) if pp > 1 else {}
        asked = {**fields, **mesh, "save_state": None, "save_as": None, "resume": str(folder / "there")}
        for _ in range(12):
            try:
                return checked(asked)
            except InputError as error:
                wrong = [one for one in (error.field, error.beside) if one in asked and one not in KEPT]
                if not wrong:
                    break
                del asked[wrong[0]]
    return None


# -- the next steps -----------------------------------------------------------------------------------
TINY: dict[str, Any] = dict(layers=2, hidden=8, heads=2, seq=8, micro_batch=1, steps=4, ranks=3)
UNTIED: dict[str, Any] = dict(TINY, tie_embeddings=False)


def assert_next_steps(
    fields: Mapping[str, Any], there: dict[str, Any], here: dict[str, Any], folder: Path
) -> RunResult:
    """Two steps there and two here are four steps here, bit for bit."""
    saved(RunConfig(**{**fields, **there}), folder, 2)
    config = RunConfig(**{**fields, **here})
    later, whole = resumed(config, folder, 2), run(config)
    assert later.losses == whole.losses[2:]
    assert repr(later.steps) == repr(whole.steps[2:])
    for name, values in whole.weights.items():
        assert later.weights[name].tobytes() == values.tobytes(), name
    return later


@pytest.mark.bits
@pytest.mark.quick(1)
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize(("there", "here"), [(0, 1), (1, 0), (2, 3), (3, 2)])
def test_stages_that_add_alike_go_on_with_the_same_bits(there: int, here: int, precision: str, tmp_path: Path) -> None:
    """With accumulation: stages 0 and 1, and stages 2 and 3."""
    fields = dict(TINY, accumulate=2, precision=precision)
    assert_next_steps(fields, dict(stage=there), dict(stage=here), tmp_path)


@pytest.mark.bits
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("there", "here"),
    [
        (dict(stage=0), dict(stage=3)),
        (dict(stage=3), dict(stage=1, partition="owner")),
        (dict(stage=2, partition="owner"), dict(stage=0)),
        (dict(stage=3, bucket_bytes=64), dict(stage=2, bucket_bytes=None)),
        (dict(stage=3), dict(stage=3, gather="module")),
        (dict(stage=3, gather="module", prefetch=2), dict(stage=3)),
        (dict(stage=0), dict(stage=3, dp_replicate=3)),
        (dict(stage=1, offload="optimizer=host"), dict(stage=3)),
    ],
    ids=str,
)
def test_without_accumulation_every_stage_and_partition_goes_on_with_the_same_bits(
    there: dict[str, Any], here: dict[str, Any], tmp_path: Path
) -> None:
    assert_next_steps(TINY, there, here, tmp_path)


@pytest.mark.bits
@pytest.mark.quick(1)
@pytest.mark.parametrize(("there", "here"), [(1, 2), (2, 1)])
def test_a_pipeline_of_untied_units_goes_on_with_the_bits_of_one_stage(there: int, here: int, tmp_path: Path) -> None:
    fields, on = dict(UNTIED, accumulate=2, stage=1), {1: dict(ranks=2, pp=1), 2: dict(ranks=4, pp=2)}
    assert_next_steps(fields, on[there], on[here], tmp_path)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "here",
    [
        dict(ranks=2, micro_batch=2),
        dict(ranks=1, micro_batch=4, stage=0),
        dict(ranks=2, accumulate=2),
        dict(ranks=8, tp=2),
    ],
    ids=str,
)
def test_other_ranks_with_the_same_batch_go_on_with_nearly_the_same_losses(
    here: dict[str, Any], tmp_path: Path
) -> None:
    """They add in another order. With SGD, so that rounding stays rounding."""
    fields = dict(TINY, ranks=4, optimizer="sgd", lr=0.1, precision="fp32", stage=2)
    whole = saved(RunConfig(**fields), tmp_path, 2)
    later = resumed(RunConfig(**{**fields, **here}), tmp_path, 2)
    np.testing.assert_allclose(later.mean_losses, whole.mean_losses[2:], rtol=1e-5)


# -- states that belong to whole pieces -----------------------------------------------------------------
LARGE: dict[str, Any] = dict(TINY, layers=1, hidden=128, vocab=128, ranks=2, stage=1)
LLAMA: dict[str, Any] = dict(TINY, model="llama", heads=4, kv_heads=2, hidden=32, lora_rank=2, ranks=2)
OF_PIECES: dict[str, dict[str, Any]] = {
    "adam8bit": dict(LARGE, optimizer="adam8bit"),
    "adam8bit-torchao": dict(LARGE, optimizer="adam8bit-torchao"),
    "adafactor": dict(TINY, ranks=2, optimizer="adafactor"),
    "muon": dict(TINY, ranks=2, optimizer="muon"),
    "nf4": dict(LLAMA, base="nf4", stage=3),
    "gptq": dict(LLAMA, base="gptq", stage=3),
    "whole scales": dict(LLAMA, base="nf4", stage=3, whole_scales=True),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("case", OF_PIECES)
def test_they_are_exact_on_another_number_of_ranks(case: str, ranks: int, tmp_path: Path) -> None:
    moved(OF_PIECES[case], {}, dict(ranks=ranks), tmp_path, random.Random(case))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("case", "there", "here"),
    [
        ("adam8bit", {}, dict(ranks=4, tp=2)),
        ("adam8bit", dict(ranks=4, tp=2), dict(tp=1)),
        ("nf4", {}, dict(ranks=4, tp=2)),
        ("nf4", dict(ranks=4, tp=2), dict(tp=1)),
        ("gptq", {}, dict(ranks=4, tp=2)),
    ],
)
def test_another_tp_is_refused_with_a_tensor_s_name(
    case: str, there: dict[str, Any], here: dict[str, Any], tmp_path: Path
) -> None:
    fields = dict(OF_PIECES[case], lora_target="all-linear") if case in ("nf4", "gptq") else OF_PIECES[case]
    result = saved(RunConfig(**{**fields, **there}), tmp_path, 2)
    with pytest.raises(InputError) as caught:
        resumed(RunConfig(**{**fields, **there, **here}), tmp_path, 2)
    said = str(caught.value)
    assert "\n" not in said
    assert any(name in said for name in result.weights), said
    assert "cannot be cut otherwise; resume with " in said
    assert ("no --tp" if there.get("tp", 1) == 1 else "--tp 2") in said


def test_other_tiles_are_refused_too(tmp_path: Path) -> None:
    fields = dict(LARGE, optimizer="adam8bit", stage=3, gather="module", tiles=2)
    saved(RunConfig(**fields), tmp_path, 2)
    with pytest.raises(InputError, match=r"of h\.0\..* cannot be cut otherwise; resume with --tiles 2, "):
        resumed(RunConfig(**fields | dict(tiles=1)), tmp_path, 2)


# -- residuals ------------------------------------------------------------------------------------------
FP32: dict[str, Any] = dict(TINY, precision="bf16", grad_dtype="fp32", ranks=4)
COMPRESSED: dict[str, dict[str, Any]] = {
    "top-k": dict(FP32, compress="top-k", compress_ratio=0.1, stage=2),
    "random-k": dict(FP32, compress="random-k", compress_ratio=0.1, stage=1),
    "dgc": dict(FP32, compress="dgc", compress_ratio=0.1, optimizer="sgd", momentum=0.9, stage=1),
    "powersgd": dict(FP32, compress="powersgd", stage=0),
    "onebit-adam": dict(FP32, compress="onebit-adam", compress_warmup=1, stage=0),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", COMPRESSED)
def test_the_mean_of_residuals_is_kept(name: str, ranks: int, tmp_path: Path) -> None:
    """What the ranks have not sent yet is what all of them together still owe: a mean of gradients."""
    fields = COMPRESSED[name]
    saved(RunConfig(**fields), tmp_path / "there", 2)
    config = RunConfig(**{**fields, "ranks": ranks}, resume=str(step_folder(tmp_path / "there", 2)))
    there, here = means_of(opened(tmp_path / "there", 2)), means_of(saved_again(config, tmp_path / "here"))
    assert there.keys() == here.keys()
    assert any(np.any(values) for values in there.values())
    for key, values in there.items():
        np.testing.assert_allclose(here[key], values, rtol=1e-7, atol=1e-9, err_msg=str(key))


def means_of(checkpoint: Any) -> dict[Any, Any]:
    by_key: dict[Any, dict[int, list[tuple[int, Any]]]] = {}
    for one, stored in checkpoint.runs():
        if one.follows == "rank":
            ranks = by_key.setdefault((one.weight, one.state), {})
            ranks.setdefault(one.rank, []).append((one.start, stored.read().reshape(-1)))
    return {
        key: np.mean(
            [np.concatenate([part for _, part in sorted(of, key=lambda one: one[0])]) for of in ranks.values()],
            0,
            np.float64,
        )
        for key, ranks in by_key.items()
    }


def test_residuals_that_no_rank_has_are_refused(tmp_path: Path) -> None:
    plain = RunConfig(**{**FP32, "stage": 1})
    saved(plain, tmp_path, 2)
    with pytest.raises(InputError, match="has no residual of ") as caught:
        resumed(plain.replace(compress="top-k"), tmp_path, 2)
    assert "\n" not in str(caught.value)
