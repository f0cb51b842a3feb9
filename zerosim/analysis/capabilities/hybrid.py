"""Hybrid sharding: replicas that average their shards of the gradients."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.analysis import formulas
from zerosim.analysis.capability import Capability, Forms, Key, Sent, Step
from zerosim.analysis.facts import frozen_of, is_by_pairs, reductions
from zerosim.config import RunConfig


def averages(config: RunConfig, step: Step) -> int:
    """Return how often replicas average gradients: once a step or once per reduced microbatch."""
    each = config.parallel.replica_reduction == "micro_batch"
    return reductions(config, step.passes) if each else step.passes


def _forms(config: RunConfig, step: Step, sent: Sent) -> Forms:
    """Yield the replicas' all_reduce."""
    times = averages(config, step)
    if config.mesh.dp_replicate > 1:
        pairs, frozen = is_by_pairs(config), frozen_of(config) is not None
        form = formulas.replica_bytes(config.mesh.dp_replicate, reductions=times, pairs=pairs, frozen=frozen)
        yield Key("sent", "all_reduce", "replicas"), form


def _states(config: RunConfig) -> Iterator[str]:
    if config.mesh.dp_replicate > 1:
        ranks, replicas = config.mesh.shards, config.mesh.dp_replicate
        yield f"{ranks:,} ranks hold one of {replicas:,} replicas together (HSDP, MiCS)."


def _volume(config: RunConfig) -> Iterator[str]:
    if config.mesh.dp_replicate > 1:
        yield "Across replicas an all_reduce averages the local shard's gradients."


CAPABILITY = Capability(forms=_forms, notes={"model_states": _states, "volume": _volume}, axes={"dp_replicate": "H"})
