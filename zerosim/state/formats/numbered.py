"""Give an optimizer's numbered states their weights' names.

`Optimizer.state_dict()` of PyTorch numbers the parameters in the order of its groups and keeps no names, unless the
optimizer was made of named parameters. The names follow from the model's own order, which a .pt file has and a
.safetensors file has not: its tensors are sorted.

Source: PyTorch 2.13, torch/optim/optimizer.py, Optimizer.state_dict; transformers 5.24, Trainer.create_optimizer: two
groups, first the weights that decay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zerosim.state.formats.archive import Stored
from zerosim.state.formats.whole import Tensor

Found = tuple[dict[str, dict[str, Tensor]], list[Any], str]


def numbered(optimizer: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Found:
    """Return states by name, each weight's count of steps, and why there are none ('' if there are).

    `shapes` has the trained weights in the model's order. One group has them in this order; of two, the first has
    those of two dimensions or more. All states' shapes are compared: no guess is taken that one of them contradicts.
    """
    by_number, groups = optimizer.get("state"), optimizer.get("param_groups")
    if not isinstance(by_number, dict) or not isinstance(groups, list):
        return {}, [], "an optimizer without state and param_groups"
    if not by_number:
        return {}, [], ""
    given = [group.get("params") for group in groups if isinstance(group, dict)]
    numbers = [one for one in given if isinstance(one, list)]
    if len(numbers) != len(groups):
        return {}, [], "an optimizer whose groups have no params"
    flat = [number for one in numbers for number in one]
    if flat and all(isinstance(number, str) for number in flat):
        return _taken(by_number, {number: number for number in flat}, shapes)
    names = _names(groups, numbers, shapes)
    if len(names) != len(flat):
        return {}, [], f"states of {len(flat):,} numbered weights, whose names are not in the files"
    return _taken(by_number, dict(zip(flat, names, strict=True)), shapes)


def has_names(optimizer: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's file says its weights' names, as keys or in its groups."""
    states, groups = optimizer.get("state"), optimizer.get("param_groups")
    keys = states if isinstance(states, dict) else {}
    if keys and all(isinstance(key, str) for key in keys):
        return True
    return isinstance(groups, list) and any(isinstance(one, dict) and "param_names" in one for one in groups)


def _names(
    groups: Sequence[Mapping[str, Any]], numbers: Sequence[Sequence[Any]], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Return the weights' names in the groups' order."""
    said = [group.get("param_names") for group in groups]
    if all(isinstance(one, list) and len(one) == len(own) for one, own in zip(said, numbers, strict=True)):
        return [str(name) for one in said if isinstance(one, list) for name in one]
    if sum(1 for one in numbers if one) > 1:
        decayed = [name for name, shape in shapes.items() if len(shape) > 1]
        rest = [name for name, shape in shapes.items() if len(shape) < 2]
        return [*decayed, *rest] if [len(one) for one in numbers] == [len(decayed), len(rest)] else []
    return list(shapes)


def _taken(by_number: Mapping[Any, Any], names: Mapping[Any, str], shapes: Mapping[str, tuple[int, ...]]) -> Found:
    states, steps = dict[str, dict[str, Tensor]](), list[Any]()
    for number, values in by_number.items():
        name = names.get(number)
        if name is None or name not in shapes or not isinstance(values, dict):
            return {}, [], f"states of weight {str(number)[:40]!r}, whose name is not in the files"
        for key, value in values.items():
            if key == "step":
                steps.append(value)
            elif isinstance(value, Stored) and value.shape == shapes[name]:
                states.setdefault(name, {})[str(key)] = value.named(f"{name}: {key}")
            elif isinstance(value, Stored) and value.shape:
                return (
                    {},
                    [],
                    f"states of numbered weights, of other shapes than the weights in the model's order ({name})",
                )
    return states, steps, ""
