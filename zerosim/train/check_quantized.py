"""Rules for the buffers of a run's model that are cut into groups of codes (ZeRO++)."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.config import RunConfig
from zerosim.errors import InputError, wrong
from zerosim.models.model import Model
from zerosim.parallel.compression.groups import ALIGNED
from zerosim.parallel.gathering import keeping, residency_of
from zerosim.placement.partition import slice_size
from zerosim.placement.spec import FlatSpec

SMALL = 100_000
"""Tensors of at most this number of elements stay gathered in DeepSpeed (stage3_param_persistence_threshold)."""


def rules(config: RunConfig, model: Model) -> Iterator[InputError]:
    """Yield a buffer whose slices are no whole groups."""
    ranks, flats = config.mesh.shards, [flat.spec for flat in model.flats]
    for name, is_on, fits, what in (
        ("quantized_weights", config.gathering.quantized_weights, _has_groups, f"not a multiple of {ALIGNED}"),
        (
            "quantized_gradients",
            config.reduction.quantized_gradients,
            _has_pairs,
            "an odd number, but two int4 codes share a byte",
        ),
    ):
        if not is_on:
            continue
        cut = [flat for flat in flats if fits is _has_pairs or not _stays(config, flat)]
        if (wrong_one := next((flat for flat in cut if not fits(flat, ranks)), None)) is None:
            continue
        right = next((size for size in range(ranks - 1, 1, -1) if all(fits(flat, size) for flat in cut)), 0)
        choose = f"choose {right * config.mesh.ranks // ranks} ranks, or " if right else "choose "
        if fits is _has_groups and wrong_one.num_parameters <= SMALL:
            least = keeping(config.gathering, wrong_one.num_parameters)
            choose += f"persistent_numel {least}, which keeps it gathered, or "
        yield wrong(
            name,
            f": of {wrong_one.name} each of {ranks} ranks has {slice_size(wrong_one.numel, ranks):,} elements, {what}; "
            f"{choose}sizes that {ALIGNED} x {ranks} divides",
        )


def _stays(config: RunConfig, flat: FlatSpec) -> bool:
    """Return whether a buffer stays gathered permanently; such a buffer is gathered exactly."""
    return residency_of(config.gathering).persistent(flat.num_parameters)


def _has_groups(flat: FlatSpec, ranks: int) -> bool:
    return slice_size(flat.numel, ranks) % ALIGNED == 0


def _has_pairs(flat: FlatSpec, ranks: int) -> bool:
    return all(len(weight.shape) < 2 for weight in flat.weights) or slice_size(flat.numel, ranks) % 2 == 0
