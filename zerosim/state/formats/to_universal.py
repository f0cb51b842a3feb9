"""Write DeepSpeed's universal checkpoints: one file per weight and state, for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerosim.errors import InputError, printable
from zerosim.state.formats.whole import WholeState
from zerosim.state.formats.written import archived, size_of

VERSION = "0.19.8"
_GROUPS = 64  # DeepSpeed restores the states of as many groups as the file has


def write_universal(folder: Path, state: WholeState) -> None:
    """Write a checkpoint that DeepSpeed loads with `checkpoint: {load_universal: true}` at ZeRO 1, 2 and 3.

    A file holds {param, cat_dim}, which ZeRO 3 takes too; its own converter writes flat tensors for it. `step.pt` and
    the common optimizer_state.pt are there for either. No learning rate is written, so the engine's own stay.

    DeepSpeed restores no frozen weights and no buffers from a universal checkpoint: load them into the module first.
    """
    step = 0 if state.step is None else state.step
    tag = folder / f"global_step{step}"
    (tag / "zero").mkdir(parents=True)
    for name, one in state.weights.items():
        inner = tag / "zero" / _checked(name)
        inner.mkdir()
        for key, tensor in {"fp32": one, **state.states.get(name, {})}.items():
            (inner / f"{key}.pt").write_bytes(archived({"cat_dim": 0, "param": tensor.read()}))
        if name in state.states:
            (inner / "step.pt").write_bytes(archived(np.array(step, np.float32)))
    groups = [{"params": list[int]()} for _ in range(_GROUPS)]
    (tag / "zero" / "optimizer_state.pt").write_bytes(
        archived(
            {
                "ds_version": VERSION,
                "param_groups": groups,
                "optimizer_state_dict": {
                    "state": {0: {"step": np.array(step, np.float32)}},
                    "param_groups": [{"params": list[int]()}],
                },
            }
        )
    )
    model = archived(_model_file(state, step))
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        (tag / file).write_bytes(model)
    (folder / "latest_universal").write_text(tag.name, encoding="utf-8")


def _checked(name: str) -> str:
    """Return a weight's name as that of a folder. Raises: InputError if it cannot be one."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise InputError(f"{printable(name[:200])!r} cannot be the name of a folder, which DeepSpeed's format needs")
    return name


def _model_file(state: WholeState, step: int) -> dict[str, Any]:
    """Return what a model_states file says; the weights themselves are in `zero/`."""
    return {
        "module": {},
        "buffer_names": list[str](),
        "optimizer": None,
        "param_shapes": [_shapes(state, [name for name in state.weights if name not in state.frozen])],
        "frozen_param_shapes": _shapes(state, [name for name in state.weights if name in state.frozen]),
        "shared_params": dict(state.aliases),
        "frozen_param_fragments": {},
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": step,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": VERSION,
    }


def _shapes(state: WholeState, names: Sequence[str]) -> dict[str, Any]:
    return {name: size_of(state.weights[name].shape) for name in names}
