"""Sort the items of a checkpoint by their names: weights, the optimizer's states, and the rest.

    model.a.weight                        a weight: a.weight
    optim.state.a.weight.exp_avg          a state of it, as torch's get_optimizer_state_dict names it
    optim.param_groups.0.lr               a setting of the optimizer
    train_state.step                      neither

Items come with the keys that lead to them, so that `model.layers.0.weight` may be one name or begin with a folder. A
file without a model's folder (torchtitan) has the weights at its root.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from zerosim.state.formats.whole import Tensor, WholeState, described

MODELS = ("model", "module", "state_dict", "model_state_dict", "app", "_model")
OPTIMIZER = re.compile(r"optim(izers?)?(_state(_dict)?|_states)?(_\d+)?")
_COUNTERS = ("global_step", "step", "iteration", "iter", "num_steps")
_FLOATS = ("float", "bfloat")
_MAY_BE_TIED = re.compile(r"embed|emb\b|wte|tok|head|output")


class Sorted(NamedTuple):
    """Items by what they are. `steps`: each weight's count of steps, a 0-dim tensor or a number."""

    weights: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    steps: list[Any]
    counters: list[Any]
    others: dict[str, str]


def sort_items(items: Mapping[tuple[str, ...], Any]) -> Sorted:
    """Return items sorted, by the keys that lead to them. A value is a `Tensor`, or whatever else the files hold."""
    found = Sorted({}, {}, [], [], {})
    has_models = any(_is_model(path) for path in items)
    for path, value in items.items():
        at = _optimizer_at(path)
        if at is not None:
            _sort_state(found, path[: at + 1], ".".join(path[at + 1 :]), value)
        elif _is_model(path) and isinstance(value, Tensor):
            _add(found.weights, ".".join(path[_model_at(path) + 1 :]), value)
        elif not has_models and isinstance(value, Tensor) and _is_weight(path, value):
            _add(found.weights, ".".join(path), value)
        else:
            if path and path[-1].rpartition(".")[2] in _COUNTERS:
                found.counters.append(value)
            _tell(found.others, path, value)
    return found


def _optimizer_at(path: tuple[str, ...]) -> int | None:
    """Return which of the first keys is the optimizer's folder."""
    return next((at for at, key in enumerate(path[:2]) if len(path) > at + 1 and OPTIMIZER.fullmatch(key)), None)


def _model_at(path: tuple[str, ...]) -> int:
    """Return which of the first keys is the model's folder. {"app": {"model": ...}} has two."""
    return 1 if len(path) > 2 and path[0] == "app" and path[1] in MODELS else 0


def _is_model(path: tuple[str, ...]) -> bool:
    return len(path) > 1 and path[0] in MODELS


def _is_weight(path: tuple[str, ...], value: Tensor) -> bool:
    return len(path) == 1 and bool(value.shape) and value.dtype.startswith(_FLOATS)


def _add(weights: dict[str, Tensor], name: str, value: Tensor) -> None:
    weights[name] = value._replace(name=name)


def _sort_state(found: Sorted, root: tuple[str, ...], rest: str, value: Any) -> None:
    """Sort an item of the optimizer: `rest` is 'state.a.weight.exp_avg'."""
    if not rest.startswith("state."):
        _tell(found.others, (*root, *rest.split(".", 1)), value)
        return
    name, _, state = rest.removeprefix("state.").rpartition(".")
    if state == "step":
        found.steps.append(value)
    elif isinstance(value, Tensor) and value.shape:
        found.states.setdefault(name, {})[state] = value._replace(name=f"{name}: {state}")
    else:
        _tell(found.others, (*root, "state", state), value)


def _tell(others: dict[str, str], path: tuple[str, ...], value: Any) -> None:
    """Say what an item is; many under one key are one line."""
    name = ".".join(path[:2]) or "its value"
    said = f"a {value.dtype} tensor of shape {value.shape}" if isinstance(value, Tensor) else described(value)
    if name not in others:
        others[name] = said
    elif len(path) > 2:
        others[name] = "several values"


def step_of(values: list[Any]) -> int | None:
    """Return the most steps of any weight. Each value is a number, or something that is read as one."""
    read = [value.read() if hasattr(value, "read") else value for value in values]
    numbers = [float(one.reshape(())) if isinstance(one, np.ndarray) and one.size == 1 else one for one in read]
    counts = [int(n) for n in numbers if isinstance(n, int | float) and 0 <= n < 2**53]
    return max(counts, default=None)


def state_of(kind: str, version: str, found: Sorted, aliases: Mapping[str, str]) -> WholeState:
    """Return sorted items as a checkpoint: weights without states are frozen where others have some."""
    weights = {name: one for name, one in found.weights.items() if name not in aliases}
    states = {name: one for name, one in found.states.items() if name in weights}
    others = dict(found.others)
    if lost := found.states.keys() - states.keys():
        others["optimizer states"] = f"of {len(lost):,} names that no weight has, such as {min(lost)}"
    floats = {name for name, one in weights.items() if one.dtype.startswith(_FLOATS)}
    frozen = frozenset(floats - states.keys()) if states else frozenset()
    step = step_of(found.steps)
    step = step_of(found.counters) if step is None else step
    return WholeState(kind, version, weights, {}, states, step, frozen, dict(aliases), others)


def tied(found: Sorted) -> dict[str, str]:
    """Return names of tables that are stored twice, and the name that has the states.

    A tied head is written under both names, its moments under one: a table without states whose bits equal one with
    states is an alias of it.
    """
    aliases = dict[str, str]()
    tables = [name for name, one in found.weights.items() if len(one.shape) == 2 and _MAY_BE_TIED.search(name)]
    for name in tables:
        one = found.weights[name]
        for other in tables:
            its = found.weights[other]
            same = (its.shape, its.dtype) == (one.shape, one.dtype) and other in found.states
            if name not in found.states and same and _same_bits(one, its):
                aliases[name] = other
                break
    return aliases if found.states else {}


def _same_bits(one: Tensor, other: Tensor) -> bool:
    ours, theirs = one.read(), other.read()
    return bool((ours.view(f"u{ours.itemsize}") == theirs.view(f"u{theirs.itemsize}")).all())
