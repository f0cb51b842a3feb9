"""Read DeepSpeed's universal checkpoints: `zero/NAME/fp32.pt` and the states beside it, one file per weight and state.

At ZeRO 1 and 2 a file is {param: the whole tensor, cat_dim}, at ZeRO 3 a flat tensor whose shape is in the model_states
file beside `zero/`. `step.pt` is there at ZeRO 1 and 2; at 3 the step is in `zero/optimizer_state.pt`. Frozen weights
have fp32.pt alone, or are in the model_states files (ZeRO 3).

Source: DeepSpeed 0.19.8, deepspeed/checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import os
from typing import Any

from zerosim.errors import InputError, printable
from zerosim.state.formats.archive import Stored, read_archive
from zerosim.state.formats.deepspeed import MODEL_FILES, ModelFile, files_of, frozen_weights, read_model_file, tagged
from zerosim.state.formats.sorting import step_of
from zerosim.state.formats.whole import Tensor, WholeState, described, joined

FP32, STEP = "fp32", "step"


def read_universal(folder: str) -> WholeState:
    """Return a universal checkpoint. Raises: InputError, in one line, for a missing or foreign file."""
    folder = tagged(folder, "latest_universal")
    zero = os.path.join(folder, "zero")
    models = [read_model_file(path) for path in files_of(folder, MODEL_FILES).values()]
    shapes = {name: shape for one in models[:1] for group in one.shapes for name, shape in group.items()}
    shared = models[0].shared if models else {}
    buffers = set(models[0].get("buffer_names") or ()) if models else set()
    weights, states, steps = dict[str, Tensor](), dict[str, dict[str, Tensor]](), list[Any]()
    others = models[0].others if models else {}
    for name in sorted(os.listdir(zero)):
        inner = os.path.join(zero, name)
        if not os.path.isdir(inner) or name in shared or name in buffers:
            continue
        for file in sorted(os.listdir(inner)):
            key, path = file.removesuffix(".pt"), os.path.join(inner, file)
            value = read_archive(path)
            if key == STEP:
                steps.append(value)
                continue
            one = _atom(value, path, name, shapes.get(name))
            if key == FP32:
                weights[name] = one
            else:
                states.setdefault(name, {})[key] = one
        if name not in weights:
            raise InputError(f"{inner} has no fp32.pt: expected the weight beside its states")
    version = _rest(os.path.join(zero, "optimizer_state.pt"), steps, others)
    frozen = {name for name in weights if name not in states}
    if models and (fragments := {n: t for n, t in frozen_weights(models, folder).items() if n not in weights}):
        weights |= fragments
        frozen |= fragments.keys()
    version = version or (str(models[0].get("ds_version") or "") if models else "")
    return WholeState(
        "deepspeed universal", version, weights, {}, states, _step(steps, models), frozenset(frozen), shared, others
    )


def _step(steps: list[Any], models: list[ModelFile]) -> int | None:
    found = step_of(steps)
    total = models[0].get("global_steps") if models else None
    return found if found is not None or type(total) is not int else total


def _atom(value: Any, path: str, name: str, shape: tuple[int, ...] | None) -> Tensor:
    """Return the tensor of a file, in its weight's shape."""
    value = value.get("param") if isinstance(value, dict) else value
    if not isinstance(value, Stored):
        raise InputError(f"{path} holds no tensor of {printable(name[:200])!r}: expected one, or a mapping with param")
    if shape is None or value.shape == shape:
        return value.named(name)
    try:
        return joined([value.named(name)], name, shape)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _rest(path: str, steps: list[Any], others: dict[str, str]) -> str:
    """Add what `optimizer_state.pt` has: the step at ZeRO 3, settings. Return DeepSpeed's version, '' if unknown."""
    if not os.path.isfile(path):
        return ""
    values = read_archive(path)
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no mapping: expected the optimizer's common state")
    inner = values.get("optimizer_state_dict")
    first = (inner.get("state") or {}).get(0) if isinstance(inner, dict) else None
    if isinstance(first, dict) and STEP in first:
        steps.append(first[STEP])
    groups = values.get("param_groups")
    steps += [one[STEP] for one in groups or () if isinstance(one, dict) and STEP in one]
    others |= {
        f"optimizer_state.{key}": described(values[key]) for key in ("loss_scaler", "param_groups") if key in values
    }
    version = values.get("ds_version")
    return version if isinstance(version, str) else ""
