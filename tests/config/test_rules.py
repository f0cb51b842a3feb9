"""Rules that look at several parts: all errors of a configuration can be listed, and the first of them is raised."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from random_configs import CHOICES

from zerosim.config import OPTIONS, RunConfig
from zerosim.config.layers import resolve
from zerosim.config.parts import CAPABILITIES, PARTS, Parts
from zerosim.errors import InputError

SIZES: Mapping[str, tuple[Any, ...]] = {
    "ranks": (1, 4, 8),
    "stage": (0, 1, 2, 3),
    "model": ("gpt", "llama", "mlp", "flat", "bert", "gpt_bigcode"),
    "tp": (1, 1, 2, 4),
    "pp": (1, 1, 2, 4),
    "accumulate": (1, 4),
    "layers": (3,),
    "heads": (3, 4),
    "seq": (9,),
    "vocab": (257,),
    "recompute": ("full:9", "full", "selective:layernorm"),
    "backend": ("cuda",),
    "world": ("mpi",),
    "ranks_per_process": (3,),
    "sample": ("é",),
    "tiles": (3,),
    "stage_layers": ("x", "1,1"),
}


def unchecked(fields: Mapping[str, Any]) -> Parts:
    """Build the parts of a configuration as `RunConfig` does, without the rules. Raises: InputError."""
    values, _ = resolve({name: OPTIONS[name].checked(value) for name, value in fields.items()})
    made = {}
    for name, kind in PARTS.items():
        options = kind.options()
        made[name] = kind(**{options[flat].attribute: values[flat] for flat in options.keys() & values.keys()})
    return Parts(**made)


def test_all_errors_can_be_listed_and_the_first_one_is_raised() -> None:
    lengths = []
    for seed in range(3000):
        rng, values = random.Random(f"rules {seed}"), {**CHOICES, **SIZES}
        names = [*rng.sample(sorted(SIZES), 4), *rng.sample(sorted(CHOICES), 2)]
        fields = {"recipe": "paper", **{name: rng.choice(values[name]) for name in names}}
        try:
            parts = unchecked(fields)
        except InputError:
            continue
        errors = list[InputError]()
        try:
            for capability in CAPABILITIES:
                for error in capability.rules(parts):
                    errors.append(error)  # those before one that is raised
        except InputError as error:  # of a list of layers that is none
            errors.append(error)
        lengths.append(len(errors))
        for error in errors:
            assert error.field in OPTIONS, error
            assert str(error).startswith(error.field), error
        try:
            RunConfig(**fields)
            said = []
        except InputError as error:
            said = [(str(error), error.field, error.beside)]
        assert said == [(str(one), one.field, one.beside) for one in errors[:1]], fields
    assert sum(length > 1 for length in lengths) > 100
    assert sum(length == 0 for length in lengths) > 100
