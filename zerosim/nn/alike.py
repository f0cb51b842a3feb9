"""A block like another one, declared and not built: its buffers have the other's weights under its own name.

A model that only says where weights lie needs no layers, and a block that repeats another one's record runs none
(`train/repeated.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from zerosim.nn.leaf import LeafModule
from zerosim.nn.unit import Unit
from zerosim.placement.spec import FlatSpec
from zerosim.tensor.flat import Flat
from zerosim.tensor.tensor import Tensor


class Buffers(NamedTuple):
    """The flat buffers and leaves of a block or, without leaves, of a leaf."""

    flats: Sequence[Flat]
    leaves: Sequence[Unit] = ()


def alike(unit: Unit, name: str, declared: Mapping[str, FlatSpec]) -> Unit:
    """Return a block called `name`, with buffers and leaves like those of `unit`, and without layers. Where the buffers
    of `unit` are those `declared` under their names, so are its own."""

    def flats(of: Unit) -> list[Flat]:
        return [_of_spec(spec(flat.spec), flat) for flat in of.flats]

    def spec(like: FlatSpec) -> FlatSpec:
        own = declared.get(name + like.name.removeprefix(unit.name)) if declared.get(like.name) is like else None
        return own or renamed(like, unit.name, name)

    leaves = [
        LeafModule(name + one.name.removeprefix(unit.name), Buffers(flats(one)), no_layers) for one in unit.leaves
    ]
    for own, leaf in zip(leaves, unit.leaves, strict=True):
        own.branches = leaf.branches
    return Unit(name, Buffers(flats(unit), leaves), no_layers, reads=unit.reads)


def share(unit: Unit, declared: Mapping[str, FlatSpec]) -> None:
    """Give a block's buffers the specs declared under their names, where these are equal."""
    for flat in unit.all_flats:
        if declared.get(flat.name) == flat.spec:
            flat.spec = declared[flat.name]


def renamed(spec: FlatSpec, unit: str, other: str) -> FlatSpec:
    """Return the buffer of the same place in another unit."""
    name, module = (other + own.removeprefix(unit) for own in (spec.name, spec.module))
    parts = ((one, *one.name.partition(f"{unit}.")) for one in spec.weights)
    weights = tuple(replace(one, name=f"{prefix}{other}.{rest}") for one, prefix, _, rest in parts)
    return replace(spec, name=name, module=module, weights=weights)


def _of_spec(spec: FlatSpec, like: Flat) -> Flat:
    """Return a buffer of these weights, as declared: without memory."""
    flat = Flat(spec.name, like.device, like.value_dtype, like.grad_dtype, spec.module, like.format)
    flat.spec = spec
    return flat


def no_layers(x: Tensor) -> Tensor:
    """Refuse to run."""
    raise AssertionError("a block that was declared like another one has no layers")
