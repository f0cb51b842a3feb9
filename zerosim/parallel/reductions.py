"""By which collectives and when gradients are reduced: the choices of a run among exchanges and reducers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from zerosim.config import RunConfig
from zerosim.config.parts.offload import has_host_buffers
from zerosim.parallel.exchange import AllReduce, KeepSlice, Owners, Slices
from zerosim.parallel.in_partition import InPartition
from zerosim.parallel.pieces import Pieces, Place
from zerosim.parallel.reducer import AtOnce, InBuckets, OutOfBuffers, Reducer

BY_WORD: Mapping[str, type[Slices]] = MappingProxyType({"reduce_scatter": Slices, "all_reduce": KeepSlice})


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add the exchange, the reducer, and how long gradients are stored."""
    buffered = has_host_buffers(config.grads, config.offload, config.precision)
    rows = partial(made.rows, grad="always" if config.grads.lasts or buffered else "step")
    return made._replace(exchange=_exchange(config), reducer=_reducer(config), rows=rows)


def _exchange(config: RunConfig) -> type[Slices]:
    stage = config.parallel.zero_stage
    if stage == 0:
        return AllReduce
    if config.parallel.partition == "owner":
        return Owners
    return Slices if stage == 3 else BY_WORD[config.reduction.grad_reduction]


def _reducer(config: RunConfig) -> Callable[[Slices], Reducer]:
    stage, how = config.parallel.zero_stage, config.reduction
    if how.bucket:
        kind = InPartition if config.grads.in_partition else OutOfBuffers
        return partial(kind, numel=how.bucket, count=how.buffers, lasting=stage == 3)
    if stage < 2:
        return partial(InBuckets, capacity=config.parallel.bucket_bytes, late=how.overlaps)
    return partial(AtOnce, late=how.overlaps)
