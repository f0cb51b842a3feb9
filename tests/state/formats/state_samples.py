"""Small checkpoints of each format, made without the frameworks: by zerosim's own writers, and opcode by opcode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from zerosim.state.formats import Tensor, WholeState, write_dcp, write_safetensors, write_universal
from zerosim.state.formats.to_dcp import write_items
from zerosim.state.formats.written import Call, Made, archived, size_of

SHAPES = {"emb.weight": (11, 6), "a.weight": (7, 6), "a.bias": (7,), "b.weight": (6, 7)}
FROZEN = "b.weight"
ALIASES = {"head.weight": "emb.weight"}
STEP = 3


def values(name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    """The same numbers for a name each time."""
    rng = np.random.default_rng(list(name.encode()))
    return rng.standard_normal(shape).astype(dtype)


def tensor(name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Tensor:
    return Tensor(name, np.dtype(dtype).name, shape, partial(values, name, shape, dtype))


def sample() -> WholeState:
    """fp32 masters with bf16 copies, Adam's states, a frozen weight in bf16 and a tied head."""
    trained = [name for name in SHAPES if name != FROZEN]
    weights = {name: tensor(name, SHAPES[name]) for name in trained}
    weights[FROZEN] = tensor(FROZEN, SHAPES[FROZEN], ml_dtypes.bfloat16)
    stored = {name: tensor(f"{name} stored", SHAPES[name], ml_dtypes.bfloat16) for name in trained}
    states = {
        name: {key: tensor(f"{name}: {key}", SHAPES[name]) for key in ("exp_avg", "exp_avg_sq")} for name in trained
    }
    return WholeState("sample", "", weights, stored, states, STEP, frozenset({FROZEN}), ALIASES, {})


def check_same(one: WholeState, other: WholeState, *, copies: bool = False) -> None:
    """Check names, dtypes, shapes and bits of weights and states, step, frozen and tied names."""
    assert (one.step, one.frozen, dict(one.aliases)) == (other.step, other.frozen, dict(other.aliases))
    mappings = [(one.weights, other.weights), (one.stored, other.stored)] if copies else [(one.weights, other.weights)]
    assert one.states.keys() == other.states.keys()
    mappings += [(own, other.states[name]) for name, own in one.states.items()]
    for ours, theirs in mappings:
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            expected, found = value.read(), theirs[name].read()
            assert (found.dtype.name, found.shape) == (theirs[name].dtype, theirs[name].shape)
            assert (expected.dtype, expected.shape, expected.tobytes()) == (found.dtype, found.shape, found.tobytes())


# -- DeepSpeed's, which zerosim does not write -------------------------------------------------------------
def deepspeed(folder: Path, stage: int = 2, ranks: int = 3) -> None:
    """What DeepSpeed 0.19.8 leaves, as test_state_deepspeed.py compares it: one group, or a sub-group a weight."""
    state = sample()
    tag = folder / "global_step3"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name, encoding="utf-8")
    trained = [name for name in state.weights if name != FROZEN]
    shapes = {name: size_of(SHAPES[name]) for name in trained}
    model: dict[str, Any] = {
        "module": {name: one.read() for name, one in state.stored.items()} if stage < 3 else {},
        "buffer_names": list[str](),
        "param_shapes": [{name: shape} for name, shape in shapes.items()] if stage == 3 else [shapes],
        "frozen_param_shapes": {FROZEN: size_of(SHAPES[FROZEN])},
        "shared_params": ALIASES,
        "skipped_steps": 0,
        "global_steps": STEP,
        "ds_version": "0.19.8",
    }
    frozen = cut(state.weights[FROZEN].read(), ranks) if stage == 3 else [state.weights[FROZEN].read()] * ranks
    kinds: dict[str, Callable[[str], Any]] = {"fp32": lambda name: state.weights[name].read()}
    kinds |= {key: partial(lambda key, name: state.states[name][key].read(), key) for key in ("exp_avg", "exp_avg_sq")}
    split = up_to_stage_2 if stage < 3 else at_stage_3
    parts = {kind: split([get(name) for name in trained], ranks) for kind, get in kinds.items()}
    for rank in range(ranks):
        if stage == 3 or not rank:
            file = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            whole = {**model, "frozen_param_fragments": {FROZEN: frozen[rank]}}
            (tag / file).write_bytes(archived(whole))
        flat = {kind: one[rank] for kind, one in parts.items()}
        step = np.array(STEP, np.float32)
        states = {
            at: {"step": step, "exp_avg": m, "exp_avg_sq": v}
            for at, (m, v) in enumerate(zip(flat["exp_avg"], flat["exp_avg_sq"], strict=True))
        }
        enum = Call("deepspeed.runtime.zero.config.ZeroStageEnum", (stage,))
        scaler = Made("deepspeed.runtime.fp16.loss_scaler.LossScaler", {"cur_scale": 1.0})
        optimizer: dict[str, Any] = {"zero_stage": enum, "loss_scaler": scaler}
        if stage < 3:
            optimizer |= {"partition_count": [ranks], "single_partition_of_fp32_groups": flat["fp32"]}
            optimizer["base_optimizer_state"] = {"state": states, "param_groups": []}
        else:
            optimizer |= {"partition_count": ranks, "fp32_flat_groups": flat["fp32"]}
            optimizer["optimizer_state_dict"] = {"state": states, "param_groups": []}
        file = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        (tag / file).write_bytes(archived({"optimizer_state_dict": optimizer, "ds_version": "0.19.8"}))


def cut(array: Any, ranks: int) -> list[Any]:
    """Equal parts of a flat array, zeros at the end."""
    share = -(-array.size // ranks)
    flat = np.zeros(share * ranks, array.dtype)
    flat[: array.size] = array.reshape(-1)
    return list(flat.reshape(ranks, share))


def up_to_stage_2(arrays: list[Any], ranks: int) -> list[list[Any]]:
    """One flat buffer of all weights, cut: by rank, then by group."""
    return [[part] for part in cut(np.concatenate([one.reshape(-1) for one in arrays]), ranks)]


def at_stage_3(arrays: list[Any], ranks: int) -> list[list[Any]]:
    """Each weight cut: by rank, then by sub-group."""
    each = [cut(one, ranks) for one in arrays]
    return [[one[rank] for one in each] for rank in range(ranks)]


# -- Megatron's -------------------------------------------------------------------------------------------
LAYERS = "decoder.layers.mlp.linear_fc1.weight"
STACKED = (3, 4, 2)


def megatron(folder: Path, ranks: int = 2) -> None:
    """A torch_dist checkpoint of megatron-core, its optimizer fully reshardable: three layers under one name."""
    inner = folder / "iter_0000012"
    inner.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("12", encoding="utf-8")
    (inner / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}', "utf-8")
    items: dict[tuple[str, ...], Any] = {
        (LAYERS,): tensor(LAYERS, STACKED, ml_dtypes.bfloat16),
        ("embedding.word_embeddings.weight",): tensor("emb", (6, 2), ml_dtypes.bfloat16),
        ("rng_state/shard_0_1",): {"seed": 5},
    }
    for key in ("fp32_param", "exp_avg", "exp_avg_sq"):
        items[(f"optimizer.state.{key}.{LAYERS}",)] = tensor(key, STACKED)
        items[(f"optimizer.state.{key}.embedding.word_embeddings.weight",)] = tensor(f"{key} emb", (6, 2))
    write_items(inner, items.items(), ranks)


WRITERS: Mapping[str, Callable[[Path], None]] = {
    "dcp": lambda folder: write_dcp(folder, sample(), 2),
    "deepspeed": deepspeed,
    "deepspeed universal": lambda folder: write_universal(folder, sample()),
    "megatron": megatron,
    "safetensors": lambda folder: write_safetensors(folder, sample()),
}
