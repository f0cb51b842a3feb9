"""Bytes per parameter of each model state in a run, from its configuration and layout."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from zerosim.analysis import formulas
from zerosim.analysis.capabilities import CAPABILITIES
from zerosim.analysis.capability import Kept
from zerosim.analysis.formulas import BytesPerParameter
from zerosim.analysis.shares import Placed, itemsizes, trained_itemsize
from zerosim.config import RunConfig
from zerosim.config.parts.offload import has_host_buffers
from zerosim.dtypes import compute_dtype, dtype
from zerosim.placement.spec import WeightSpec


def cost_of(placed: Placed, stage: int | None = None) -> BytesPerParameter:
    """Return the bytes per parameter of each model state in this run, for the whole model or a pipeline stage's
    share."""
    config, layout = placed.config, placed.layout
    kept, masters = _kept(config), _has_masters(config)
    sizes = trained_itemsize(config), itemsizes(config)[1]
    moments = formulas.num_moments(config.optim.optimizer, kept.momentum) + (_compensation(config) > 0)
    cost = formulas.bytes_per_parameter(*sizes, moments, cast_shards=kept.casts, masters=masters)
    if kept.masters and not masters:
        cost = replace(cost, optim=cost.optim + formulas.MASTER_BYTES)
    if has_host_buffers(config.grads, config.offload, config.precision):
        cost = replace(cost, grad=formulas.MASTER_BYTES)
    if not kept.grads:
        cost = replace(cost, grad=0)
    if config.optim.optimizer in formulas.UNIFORM:
        return cost
    names = layout.flats if stage is None else layout.stages[stage]
    weights = [weight for name in names if layout.is_trained(name) for weight in layout.flats[name].weights]
    nbytes = sum(kept_bytes(config, weight, weight.numel) for weight in weights)
    return replace(cost, optim=Fraction(nbytes, sum(weight.numel for weight in weights) or 1))


def kept_bytes(config: RunConfig, weight: WeightSpec, held: int) -> int:
    """Return the bytes of master and states for a rank's `held` elements of a weight."""
    name, (master, each), momentum = config.optim.optimizer, _kept_sizes(config), config.optim.momentum
    return (master + _compensation(config)) * held + formulas.state_bytes(
        name, weight.shape, held, each, momentum, in_block=weight.in_block, embedding=weight.embedding
    )


def kept_padding(config: RunConfig, padding: int) -> int:
    """Return the same for padding at the end of a slice."""
    name, (master, each), momentum = config.optim.optimizer, _kept_sizes(config), config.optim.momentum
    return (master + _compensation(config)) * padding + formulas.padding_bytes(name, padding, each, momentum)


def master_bytes(config: RunConfig) -> int:
    """Return the bytes per parameter before there are optimizer states."""
    return _kept_sizes(config)[0]


def _kept_sizes(config: RunConfig) -> tuple[int, int]:
    """Return the bytes of a parameter's master, and of one number of an optimizer state."""
    master, stored = formulas.MASTER_BYTES if _kept(config).masters else 0, dtype(config.precision.stored)
    return master, (stored if config.precision.is_pure else compute_dtype(stored)).itemsize


def _compensation(config: RunConfig) -> int:
    """Return the bytes of Kahan's number per parameter."""
    return dtype(config.precision.stored).itemsize if config.precision.rounding == "kahan" else 0


def _has_masters(config: RunConfig) -> bool:
    return config.precision.has_masters and trained_itemsize(config) == itemsizes(config)[0]


def _kept(config: RunConfig) -> Kept:
    kept = Kept(config.optim.momentum, _has_masters(config))
    for capability in CAPABILITIES:
        kept = capability.kept(config, kept)
    return kept
