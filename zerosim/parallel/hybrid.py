"""Hybrid sharding (HSDP, MiCS): states are cut within groups of ranks, and replicas average their shards
(`reducer.py`, `across.py`)."""

from __future__ import annotations

from functools import partial

from zerosim.config import RunConfig
from zerosim.parallel.gathers import TwoHops
from zerosim.parallel.pieces import Pieces, Place


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add MiCS's gather in two hops, and when replicas average."""
    if config.gathering.hierarchical_gather:
        made = made._replace(gathers=TwoHops())
    if config.parallel.zero_stage < 2:
        return made
    each = config.parallel.replica_reduction == "micro_batch"
    beside = config.reduction.overlaps
    averages = ("beside" if beside else "each") if each else "last" if config.parallel.overlaps_reductions else "after"
    return made._replace(reducer=partial(made.reducer, averages=averages))
