"""Read Megatron's checkpoints: `iter_0000500`, or the folder with `latest_checkpointed_iteration.txt`.

    metadata.json                        {sharded_backend: torch_dist, ...}
    .metadata, __0_0.distcp              a distributed checkpoint of PyTorch: weights, states, objects
    common.pt                            arguments and counters; newer versions have them inside
    mp_rank_00/model_optim_rng.pt        --ckpt-format torch

Layers of one kind are stacked under one name in older files: `decoder.layers.mlp.linear_fc1.weight` of shape (L, ...)
becomes L weights `decoder.layers.0.mlp.linear_fc1.weight`, ... An optimizer saved as `fully_reshardable` has states by
name, `optimizer.state.exp_avg.NAME`. As `dp_reshardable`, the default, it has buckets whose layout is not in the files.

Source: megatron-core 0.16.1, dist_checkpointing/ (run on CPUs, with names and layouts as its optimizers give them) and
optimizer/distrib_optimizer.py (read). No checkpoint of a training run on GPUs was at hand: torch_dcp, fsdp_dtensor, the
torch format and objects inside of newer folders follow the sources alone.
"""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

from zerosim.config.inputs import read_file, read_json
from zerosim.errors import InputError, printable
from zerosim.state.formats.archive import read_archive
from zerosim.state.formats.dcp import read_dcp, read_items
from zerosim.state.formats.torch_file import from_values
from zerosim.state.formats.whole import Tensor, WholeState, described

LATEST, CONFIG = "latest_checkpointed_iteration.txt", "metadata.json"
_ITERATION = re.compile(r"iter_(\d{7,})")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_BUCKET = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\..*")
_STACKED = re.compile(r"(.*\blayers)\.(?!\d)(.+)")
_MASTERS = ("fp32_param", "param")
_BUCKETS = (
    "in buckets (dp_reshardable), whose layout is not in the files: save with --dist-ckpt-optim-fully-reshardable to "
    "read fp32 weights and states"
)


def is_megatron(folder: str, names: list[str]) -> bool:
    """Return whether a folder is Megatron's."""
    if LATEST in names or any(re.fullmatch(r"mp_rank_\d\d(_\d{3})*", name) for name in names):
        return True
    return CONFIG in names and "sharded_backend" in _config(folder)


def read_megatron(folder: str) -> WholeState:
    """Return a checkpoint of Megatron: fp32 weights and states where they are saved by name, else the weights alone.

    Raises: InputError, in one line, for a damaged folder, and for the torch format of several model-parallel ranks.
    """
    folder = _iteration(folder)
    names = sorted(os.listdir(folder))
    match = _ITERATION.fullmatch(os.path.basename(os.path.abspath(folder)))
    step = int(match[1]) if match else None
    if CONFIG not in names:
        return _legacy(folder, names, step)
    config = _config(folder)
    backend, version = str(config.get("sharded_backend")), str(config.get("sharded_backend_version", ""))
    if backend != "torch_dist":
        if backend not in ("fsdp_dtensor", "torch_dcp"):
            raise InputError(
                f"{folder} has backend {printable(backend[:40])!r}: expected torch_dist; save it as this one"
            )
        return read_dcp(folder, f"megatron {backend}")._replace(step=step)
    state = _of_items(folder, step, version)
    beside = {name: "arguments and counters of the run" for name in names if name == "common.pt"}
    return state._replace(others={**state.others, **beside})


def _iteration(folder: str) -> str:
    """Return the folder of the iteration that the file names."""
    path = os.path.join(folder, LATEST)
    if not os.path.isfile(path):
        return folder
    text = read_file(path, "", 4096).decode("utf-8", "replace").strip()
    name = text if text == "release" else f"iter_{int(text):07}" if text.isascii() and text.isdigit() else ""
    inner = os.path.join(folder, name)
    if not name or not os.path.isdir(inner):
        raise InputError(
            f"{path} says {printable(text[:40])!r}, and {folder} has no such iteration: pass one that is there"
        )
    return inner


def _config(folder: str) -> dict[str, Any]:
    values = read_json(os.path.join(folder, CONFIG))
    return values if isinstance(values, dict) else {}


def _of_items(folder: str, step: int | None, version: str) -> WholeState:
    items, _ = read_items(folder, _rows_of)
    weights, states, others = dict[str, Tensor](), dict[str, dict[str, Tensor]](), dict[str, str]()
    masters = dict[str, Tensor]()
    for keys, one in items.items():
        name = ".".join(keys)
        if match := _STATE.fullmatch(name):
            if isinstance(one, Tensor):
                inner = match[2].removeprefix("model.")
                if match[1] in _MASTERS:
                    masters[inner] = one
                else:
                    states.setdefault(inner, {})[match[1]] = one._replace(name=f"{inner}: {match[1]}")
        elif _BUCKET.fullmatch(name):
            others["optimizer"] = _BUCKETS
        elif isinstance(one, Tensor) and one.shape and not name.startswith(("optimizer", "rng_state", "chained_")):
            weights[name.removeprefix("model.")] = one._replace(name=name.removeprefix("model."))
        else:
            others[name.partition("/shard")[0]] = described(one)
    fitted = {name: _fitted(one, weights[name]) for name, one in masters.items() if name in weights}
    of_weights = {
        name: {key: _fitted(one, weights[name]) for key, one in own.items()}
        for name, own in states.items()
        if name in weights
    }
    if lost := (states.keys() | masters.keys()) - weights.keys():
        others["optimizer states"] = f"of {len(lost):,} names that no weight has, such as {min(lost)}"
    stored = {name: weights[name] for name, one in fitted.items() if one.dtype != weights[name].dtype}
    frozen = frozenset(weights.keys() - of_weights.keys()) if of_weights else frozenset()
    return WholeState(
        f"megatron torch_dist {version}".strip(), "", weights | fitted, stored, of_weights, step, frozen, {}, others
    )


def _rows_of(name: str) -> tuple[str, str] | None:
    """Return the name before and after a layer's number that a stacked name lacks, None for a name with numbers."""
    prefix = _STATE.fullmatch(name)
    head = name[: prefix.start(2)] if prefix else ""
    match = _STACKED.fullmatch(name.removeprefix(head))
    return (f"{head}{match[1]}.", f".{match[2]}") if match and not _BUCKET.fullmatch(name) else None


def _fitted(one: Tensor, weight: Tensor) -> Tensor:
    """Return a state in its weight's shape: `fully_sharded_model_space` has (pieces, 1, ..., elements of a piece)."""
    if one.shape == weight.shape:
        return one
    count, needed = 1, 1
    for size in one.shape:
        count *= size
    for size in weight.shape:
        needed *= size
    if count != needed or any(size != 1 for size in one.shape[1:-1]):
        raise InputError(
            f"{one.name!r} has shape {one.shape}, and its weight {weight.shape}: save it fully reshardable"
        )
    return Tensor(one.name, one.dtype, weight.shape, partial(_reshaped, one, weight.shape))


def _reshaped(one: Tensor, shape: tuple[int, ...]) -> Any:
    return one.read().reshape(shape)


def _legacy(folder: str, names: list[str], step: int | None) -> WholeState:
    """Return the weights of --ckpt-format torch on one model-parallel rank."""
    ranks = [name for name in names if name.startswith("mp_rank_")]
    if len(ranks) != 1:
        raise InputError(
            f"{folder} has {len(ranks)} mp_rank folders, and zerosim reads that of one: save it with "
            "--ckpt-format torch_dist, which joins tensor- and pipeline-parallel ranks"
        )
    path = os.path.join(folder, ranks[0], "model_optim_rng.pt")
    value = read_archive(path)
    model = value.get("model") if isinstance(value, dict) else None
    if not isinstance(model, dict):
        raise InputError(f"{path} has no model: expected Megatron's model_optim_rng.pt")
    state = from_values({"model": model}, path, "megatron torch")
    others = {**state.others, "optimizer": "flat, not read: save with --ckpt-format torch_dist"}
    return state._replace(step=step, others=others)
