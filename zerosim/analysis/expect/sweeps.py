"""The grid of runs in a table: axes of fields' values, or of named cases.

In `[sweep]` an axis is a list of values of one field (ranks = [1, 4, 16]), or a table of cases
([sweep.schedule], each a name and the fields that it sets). The first axis goes down a table, the
others across, the last one fastest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerosim.config import OPTIONS
from zerosim.errors import InputError, did_you_mean

MP = "mp"
"""An axis that is no field: the model-parallel degree, over which parameters or checkpoints are divided."""

PIPELINE_STAGE = "pipeline_stage"
"""An axis that is no field: the pipeline stage, from 0, of the ranks in question; without it, the fullest ranks."""

BANDWIDTH = "bandwidth"
"""An axis that is no field: bytes per second of a node's NICs, or of a formula."""

GPU = "gpu"
"""An axis that is no field: the device of the times, in place of the table's."""

NO_FIELDS = (MP, PIPELINE_STAGE, BANDWIDTH, GPU)

MOST_PLACES = 10_000
"""The limit of a grid: axes multiply, and a few lines could ask for too many runs."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of a table: a name, a label per value, and the fields that each sets."""

    name: str
    labels: tuple[str, ...]
    changes: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One cell of the grid: its label on each axis, and its fields."""

    labels: tuple[str, ...]
    changes: Mapping[str, Any]


def read_axes(sweep: Mapping[str, Any], beside: Mapping[str, Any]) -> tuple[Axis, ...]:
    """Read the axes of a [sweep] table. `beside` are the values beside it.

    Raises: InputError for a name that is no field, an axis without values, a value twice, a field given twice, and
    more than `MOST_PLACES`.
    """
    axes = tuple(_axis(name, values) for name, values in sweep.items())
    if (places := math.prod(len(axis.labels) for axis in axes)) > MOST_PLACES:
        raise InputError(f"sweep: {places:,} runs, expected at most {MOST_PLACES:,}")
    given = [name for name in sweep if name in beside]
    if given:
        raise InputError(f"sweep: {given[0]} is also set outside the sweep; leave one of them out")
    return axes


def grid(axes: Sequence[Axis]) -> list[Point]:
    """Return every cell, the last axis fastest; one cell without axes."""
    places = itertools.product(*(zip(axis.labels, axis.changes, strict=True) for axis in axes))
    points = []
    for place in places:
        changes: dict[str, Any] = {}
        for _, values in place:
            changes.update(values)
        points.append(Point(tuple(label for label, _ in place), changes))
    return points


def describe(axes: Sequence[Axis], labels: Sequence[str]) -> str:
    """Return 'ranks=64, params=7.5B, stage=1'."""
    return ", ".join(f"{axis.name}={label}" for axis, label in zip(axes, labels, strict=True))


def _axis(name: str, values: object) -> Axis:
    if isinstance(values, dict):
        if name in (*OPTIONS, *NO_FIELDS):
            raise InputError(f"sweep: {name} is a field: set it to a list of values")
        if not values or not all(isinstance(case, dict) for case in values.values()):
            raise InputError(f'sweep.{name}: expected cases, each a name and the fields it sets, "a" = {{ stage = 1 }}')
        return Axis(name, tuple(values), tuple(values.values()))
    if name not in (*OPTIONS, *NO_FIELDS):
        raise InputError(
            f"sweep: unknown field {name!r}; {did_you_mean(name, [*OPTIONS, *NO_FIELDS], 'see zerosim run')}"
        )
    if not isinstance(values, list) or not values:
        raise InputError(f"sweep: {name} {values!r}: expected a list of values")
    if len(values) > MOST_PLACES:
        raise InputError(f"sweep: {name} has {len(values):,} values, expected at most {MOST_PLACES:,}")
    for index, value in enumerate(values):
        if value in values[:index]:
            raise InputError(f"sweep: {name} holds {value!r} twice")
    if name == MP and not all(type(value) is int and value >= 1 for value in values):
        raise InputError(f"sweep: mp {values!r}: expected whole numbers of at least 1")
    return Axis(name, tuple(str(value) for value in values), tuple({name: value} for value in values))
