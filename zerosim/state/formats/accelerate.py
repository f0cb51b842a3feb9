"""Read folders of accelerate's save_state and of transformers' Trainer (checkpoint-500).

    pytorch_model_fsdp_0/ optimizer_0/             FSDP, SHARDED_STATE_DICT: two distributed checkpoints
    pytorch_model_fsdp.bin optimizer.bin           FSDP, FULL_STATE_DICT: states by name
    model.safetensors optimizer.bin                accelerate without FSDP: states by number
    model.safetensors optimizer.pt trainer_state.json       the Trainer's

States by number get names only where the model's order is known: from a .bin file, or from the caller.

Source: accelerate 1.15, utils/fsdp_utils.py and checkpointing.py; transformers 5.24, trainer.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from zerosim.config.inputs import read_json
from zerosim.config.released import INDEX, PEFT, SINGLE
from zerosim.errors import InputError
from zerosim.state.formats.archive import read_archive
from zerosim.state.formats.dcp import Item, read_items
from zerosim.state.formats.numbered import has_names, numbered
from zerosim.state.formats.shards import read_safetensors
from zerosim.state.formats.sorting import MODELS, sort_items, state_of, step_of, tied
from zerosim.state.formats.torch_file import from_values
from zerosim.state.formats.whole import Tensor, WholeState

TRAINER = "trainer_state.json"
FULL, OPTIMIZERS = ("pytorch_model_fsdp.bin", "pytorch_model.bin"), ("optimizer.bin", "optimizer.pt")
SHARDED = "pytorch_model_fsdp_0"
_SHARDED_OPTIMIZER = "optimizer_0"
_OF_RANK = re.compile(r"(pytorch_model_fsdp|optimizer)(_0)?_rank_?\d+\.bin")
_BESIDE = (
    (re.compile(r"random_states_\d+\.pkl|rng_state(_\d+)?\.pth"), "states of random generators"),
    (re.compile(r"scheduler(_\d+)?\.(bin|pt)"), "a learning-rate schedule"),
    (re.compile(r"scaler\.(bin|pt)"), "a loss scale"),
    (re.compile(r"(dl_state_dict|sampler)(_\d+)?\.bin"), "the position in the data"),
    (re.compile(r"custom_checkpoint_\d+\.pkl"), "objects of the script"),
    (re.compile(r"training_args\.bin"), "the Trainer's arguments"),
)
_LARGEST_JSON = 2**28


def is_accelerate(names: Sequence[str]) -> bool:
    """Return whether a folder's files are those of accelerate or the Trainer."""
    return any(
        name in (TRAINER, SHARDED, *FULL, *OPTIMIZERS) or _OF_RANK.fullmatch(name) or _BESIDE[0][0].fullmatch(name)
        for name in names
    )


def read_accelerate(folder: str, order: Sequence[str] | None = None) -> WholeState:
    """Return the weights of such a folder, and the states whose weights are known by name; `others` says why not.

    `order`: the trained weights in the model's order, for states by number.

    Raises: InputError, in one line, for a folder without weights and for files that only the same ranks can load.
    """
    names = sorted(os.listdir(folder))
    if of_rank := [name for name in names if _OF_RANK.fullmatch(name)]:
        raise InputError(
            f"{folder} has a file of each rank ({of_rank[0]}), which only as many ranks can load: save it with "
            "fsdp_state_dict_type SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    kind = "trainer" if TRAINER in names else "accelerate"
    if SHARDED in names:
        state = _sharded(folder, names, kind)
    elif full := [name for name in FULL if name in names]:
        state = _full(folder, full[0], names, kind, order)
    elif {SINGLE, INDEX, PEFT} & set(names):
        state = _beside_safetensors(folder, names, order)._replace(kind=kind)
    else:
        raise InputError(f"{folder} has no weights: expected {SINGLE}, {FULL[0]} or {SHARDED} beside the optimizer's")
    beside = {name: said for name in names for pattern, said in _BESIDE if pattern.fullmatch(name)}
    step = _global_step(folder) if TRAINER in names else None
    return state._replace(step=state.step if step is None else step, others={**state.others, **beside})


def _sharded(folder: str, names: Sequence[str], kind: str) -> WholeState:
    """Return two distributed checkpoints as one."""
    items, version = read_items(os.path.join(folder, SHARDED))
    whole: dict[tuple[str, ...], Tensor | Item] = {
        keys if keys[0] in MODELS and len(keys) > 1 else ("model", *keys): one for keys, one in items.items()
    }
    if _SHARDED_OPTIMIZER in names:
        states, _ = read_items(os.path.join(folder, _SHARDED_OPTIMIZER))
        whole |= {keys if keys[0] == "optimizer" else ("optimizer", *keys): one for keys, one in states.items()}
    found = sort_items(whole)
    return state_of(kind, version, found, tied(found))


def _optimizer(folder: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the optimizer's file as {optimizer: ...}, empty without one."""
    file = next((name for name in OPTIMIZERS if name in names), None)
    value = read_archive(os.path.join(folder, file)) if file else None
    return {"optimizer": value} if isinstance(value, dict) else {}


def _full(folder: str, file: str, names: Sequence[str], kind: str, order: Sequence[str] | None) -> WholeState:
    path = os.path.join(folder, file)
    model = read_archive(path)
    if not isinstance(model, dict):
        raise InputError(f"{path} holds no state dict: expected the model's weights")
    return from_values({"model": model, **_optimizer(folder, names)}, path, kind, order)


def _beside_safetensors(folder: str, names: Sequence[str], order: Sequence[str] | None) -> WholeState:
    """Return the weights, and the states if their numbers' names are in the optimizer's file, or the order is given."""
    state, optimizer = read_safetensors(folder), _optimizer(folder, names).get("optimizer", {})
    if not optimizer:
        return state
    every = {name: one.shape for name, one in state.weights.items()}
    states, steps, why = numbered(optimizer, every if has_names(optimizer) else _ordered(every, order))
    if not steps:
        own = optimizer.get("state")
        steps = [one["step"] for one in own.values() if "step" in one] if isinstance(own, dict) else []
    others = {**state.others, "optimizer": why} if why else state.others
    frozen = frozenset(state.weights.keys() - states.keys()) if states else frozenset()
    return state._replace(states=states, step=step_of(steps), frozen=frozen, others=others)


def _ordered(shapes: Mapping[str, tuple[int, ...]], order: Sequence[str] | None) -> dict[str, tuple[int, ...]]:
    return {name: shapes[name] for name in order or () if name in shapes}


def _global_step(folder: str) -> int | None:
    values = read_json(os.path.join(folder, TRAINER), largest=_LARGEST_JSON)
    step = values.get("global_step") if isinstance(values, dict) else None
    return step if type(step) is int else None
