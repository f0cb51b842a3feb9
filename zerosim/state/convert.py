"""A checkpoint of zerosim as one of another framework, and the other way round: names, layouts, states, the step.

Names are transformers' there (`models/released.py`). A state of a weight has the weight's layout, so it is renamed,
regrouped and taken apart in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zerosim.config import RunConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.config.parts.tuning import is_adapter
from zerosim.config.safetensors import WRITTEN, Planned, write_tensors
from zerosim.errors import InputError
from zerosim.models.model import Shapes
from zerosim.models.released import from_groups, grouped_names, read_found, stored_names, to_groups
from zerosim.models.stacks import stacked, unstacked
from zerosim.state.checkpoint import Checkpoint
from zerosim.state.folder import step_folder, write_json
from zerosim.state.formats.whole import Tensor, WholeState, host_dtype
from zerosim.state.manifest import MANIFEST, Manifest, checksum
from zerosim.state.runs import BIAS, PARAM, Run, to_json

HALF = {"bf16": "bfloat16", "fp16": "float16"}


def to_whole(checkpoint: Checkpoint, config: RunConfig) -> WholeState:
    """Return a checkpoint of zerosim under transformers' names, without its values. `config`: of the run that saved it.

    Raises: InputError for adapters and weights stored as codes, which these formats do not have.
    """
    weights, half = dict[str, Planned](), HALF.get(config.precision.param_dtype)
    states: dict[str, dict[str, Planned]] = {}
    for weight, state in checkpoint.names:
        if is_adapter(weight):
            raise InputError(
                f"{checkpoint.folder}: has adapters ({weight}); write them with zerosim run --save-adapters"
            )
        if checkpoint.follows(weight, state) not in ("elements", "rank", "packed"):
            raise InputError(
                f"{checkpoint.folder}: {state} of {weight} are codes or factors of zerosim's own; other frameworks "
                "read no such file. Weights alone: zerosim run --save-weights DIR"
            )
        one = _planned(checkpoint, weight, state, config.model)
        if state in (PARAM, BIAS):
            weights[weight] = one
        elif checkpoint.follows(weight, state) == "elements":
            states.setdefault(state, {})[weight] = one
    renamed = partial(_renamed, names=stored_names(config.model, weights), model=config.model)
    found = {state: renamed(own) for state, own in states.items()}
    whole = renamed(weights)
    return WholeState(
        kind="zerosim",
        version=checkpoint.manifest.version,
        weights=whole,
        stored={} if half is None else {name: _rounded(one, half) for name, one in whole.items()},
        states={name: {state: own[name] for state, own in found.items() if name in own} for name in whole},
        step=checkpoint.manifest.numbers["control"]["updates"],
        frozen=frozenset(name for name in whole if not any(name in own for own in found.values())),
        aliases={},
        others={state: "each rank's own" for _, state in checkpoint.names if state in ("residual", "worker_error")},
    )


def _planned(checkpoint: Checkpoint, weight: str, state: str, model: ModelConfig) -> Planned:
    def values() -> Any:
        whole = checkpoint.whole(weight, state)
        return to_groups(whole, model) if weight in grouped else whole

    grouped = grouped_names(model)
    return Planned(weight, checkpoint.dtype(weight, state), checkpoint.shapes[weight], values)


def _renamed(own: Mapping[str, Planned], names: Mapping[str, str], model: ModelConfig) -> dict[str, Tensor]:
    numpy = {stored: name for name, stored in WRITTEN.items()}
    given = [one._replace(name=names[name]) for name, one in own.items()]
    return {one.name: Tensor(one.name, numpy[one.dtype], one.shape, one.values) for one in unstacked(given, model)}


def _rounded(one: Tensor, dtype: str) -> Tensor:
    return one._replace(dtype=dtype, read=lambda: one.read().astype(host_dtype(dtype)))


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor of another framework, as released weights are read."""

    path: str
    tensor: Tensor

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def fail(self, text: str) -> InputError:
        return InputError(f"{self.path}: tensor {self.name!r} {text}")

    def check_float(self) -> None:
        if self.tensor.dtype not in ("float64", "float32", "float16", "bfloat16"):
            raise self.fail(f"is {self.tensor.dtype}: expected a float of 16 to 64 bits")

    def read(self, first: int = 0, last: int | None = None) -> Any:
        """Return its values, or some of them in one row; halves as the equal fp32."""
        values = self.tensor.read()
        values = values if values.dtype == np.float64 else values.astype(np.float32)
        return values if first == 0 and last is None else values.reshape(-1)[first:last]


def from_whole(
    state: WholeState, path: str, config: RunConfig, shapes: Shapes, folder: Path, step: int | None = None
) -> tuple[Path, list[str]]:
    """Write another framework's checkpoint, read from `path`, as a saved step in `folder`, for the model of `config`
    with those `shapes`. `step`: of optimizer steps done, where its files say none.

    Return where it is, and what was left out. Raises: InputError for another model; OSError.
    """
    weights = read_found(_found(state.weights, path), path, config.model, shapes)
    own = {PARAM: weights, **{name: dict(_of_state(state, name, path, config, shapes)) for name in _state_names(state)}}
    done, place = (state.step if step is None else step) or 0, step_folder(folder, (state.step or step) or 0)
    place.mkdir()
    runs = [
        Run(weight, weight, name, shapes[weight], (), "elements", 0, math.prod(shapes[weight]))
        for name, found in own.items()
        for weight in found
    ]
    made = [
        Planned(run.name, "F32", (run.numel,), partial(_flat, own[run.state][run.weight])) for run in runs
    ]  # zerosim's masters and states are fp32
    tensors, index = place / "rank-00000.safetensors", place / "rank-00000.json"
    with tensors.open("wb") as file:
        write_tensors(file, made)
    write_json(index, [to_json(run) for run in runs])
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in config.given.items()}
    numbers = {"control": {"steps": done, "updates": done if len(own) > 1 else 0, "lr": 0.0}, "scaler": None}
    manifest = Manifest(done, 1, {**given, "ranks": 1}, numbers, (checksum(tensors), checksum(index)))
    write_json(place / MANIFEST, manifest.to_dict())
    return place, [f"{name}: {what}" for name, what in state.others.items()]


def _flat(values: Callable[[], Any]) -> Any:
    return np.ascontiguousarray(values(), np.float32).reshape(-1)


def _found(tensors: Mapping[str, Tensor], path: str) -> dict[str, Any]:
    return {name: Found(path, one) for name, one in tensors.items()}


def _state_names(state: WholeState) -> list[str]:
    return list(dict.fromkeys(name for own in state.states.values() for name in own))


def _of_state(
    state: WholeState, name: str, path: str, config: RunConfig, shapes: Shapes
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the weights that have a state, and how to read it. Raises: InputError for a state of another shape."""
    there = {weight: own[name] for weight, own in state.states.items() if name in own}
    found, model = stacked(_found(there, path), config.model), config.model
    names, grouped = stored_names(model, shapes, state.weights), grouped_names(model)
    for weight, shape in shapes.items():
        one = found.get(names[weight])
        if one is None:
            continue
        if tuple(one.shape) != shape:
            raise one.fail(f"is {name} of shape {tuple(one.shape)}: {weight} has {shape}; convert weights alone")
        yield weight, partial(_read, one, model if weight in grouped else None)


def _read(one: Any, model: ModelConfig | None) -> Any:
    return one.read() if model is None else from_groups(one.read(), model)
