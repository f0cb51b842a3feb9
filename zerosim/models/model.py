"""What every model is: a list of units over flat buffers, in forward order.

Its full weights are read and stored by name (`state_dict`, `load_state_dict`). Building a model declares its
layout and takes no memory; a strategy places one flat after the other (`parallel/base.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zerosim.errors import InputError
from zerosim.nn import Unit
from zerosim.placement.spec import WeightSpec
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import normal

Shapes = dict[str, tuple[int, ...]]


class Model:
    """Units in forward order. `flats` are the distinct buffers, in the order of their first use."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self.flats: list[Flat] = []
        for unit in units:
            if all(unit.flat is not flat for flat in self.flats):
                self.flats.append(unit.flat)

    @property
    def num_parameters(self) -> int:
        """Psi: every parameter once, a tied one included once, padding not."""
        return sum(flat.numel for flat in self.flats)

    @property
    def tied_numel(self) -> int:
        """Elements of the buffers that two units share: the tied table."""
        return sum(unit.flat.numel for unit in self.units if not unit.reduces)

    def shapes(self) -> Shapes:
        """Name and shape of every parameter, in the order of the layout."""
        return {weight.name: weight.shape for flat in self.flats for weight in flat.spec.weights}

    def state_dict(self) -> dict[str, Any]:
        """Full parameters by name as host arrays (the fp32 masters where there are any).

        Raises: InputError where this rank holds a slice only.
        """
        return {name: value for flat in self.flats for name, value in _whole_values(flat)}

    def load_state_dict(self, weights: Mapping[str, Any], *, exact_master: bool = False) -> None:
        """Store full host arrays in whatever part of them this rank holds.

        Raises: InputError naming what is missing, unknown, or of another shape.
        """
        check_names(weights, self.shapes())
        check_shapes({name: tuple(array.shape) for name, array in weights.items()}, self.shapes())
        for flat in self.flats:
            load_flat(flat, weights, exact_master=exact_master)


def check_names(given: Iterable[str], expected: Shapes, whose: str = "the weights") -> None:
    """Raises: InputError naming the first few names that are missing or unknown."""
    given = set(given)
    missing = [name for name in expected if name not in given]
    unknown = sorted(given - set(expected))
    if missing or unknown:
        parts = [f"missing {_some(missing)}"] if missing else []
        parts += [f"unknown {_some(unknown)}"] if unknown else []
        raise InputError(f"{whose} do not fit the model: {'; '.join(parts)}")


def check_shapes(given: Shapes, expected: Shapes, whose: str = "the weights") -> None:
    """Raises: InputError naming the first of another shape."""
    for name, shape in expected.items():
        if given[name] != shape:
            raise InputError(f"{whose} do not fit the model: {name} has shape {given[name]}, expected {shape}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def load_flat(flat: Flat, weights: Mapping[str, Any], *, exact_master: bool) -> None:
    """Store full host arrays by name in what this rank holds of one flat; see `Flat.write`."""
    for index, weight in enumerate(flat.spec.weights):
        flat.write(index, weights[weight.name], exact_master=exact_master)


def draw_flat(flat: Flat, seed: int, *, exact_master: bool) -> None:
    """Initial weights of one flat: a function of (seed, name) alone, one parameter at a time."""
    for index, weight in enumerate(flat.spec.weights):
        flat.write(index, initial_values(weight, seed), exact_master=exact_master)


def initial_values(weight: WeightSpec, seed: int) -> Any:
    """A parameter's initial values, a host array of its shape in float32: normals of its std, or its fill."""
    import numpy as np

    if weight.std is None:
        return np.full(weight.shape, weight.fill, np.float32)
    return normal(weight.shape, weight.std, "weight", seed, weight.name)


def _whole_values(flat: Flat) -> list[tuple[str, Any]]:
    source = flat.param if flat.master is None else flat.master
    if source is None or source.numel < flat.numel:
        raise InputError(f"{flat.name} is sharded on rank {flat.device.rank}: gather it before asking for its weights")
    to_host = flat.device.backend.to_host
    return [(weight.name, to_host(flat.window(source, i).array)) for i, weight in enumerate(flat.spec.weights)]
