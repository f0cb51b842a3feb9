"""A plan's warnings: choices that are slow, unusual, or leave no room. Each names the better flag."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from zerosim.analysis.capabilities import notes_of
from zerosim.config import RunConfig
from zerosim.config.parts.allocators import is_exact, without_fragmentation
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.recipes import find_recipe
from zerosim.placement.mesh import STATES
from zerosim.report.look import Stack, prose
from zerosim.report.names import counted
from zerosim.report.verdict import Limit
from zerosim.units import format_bytes

LITTLE = 0.02
"""Of a device's memory: with less of it free, a plan that fits is a near miss."""


def warnings_of(config: RunConfig, limit: Limit | None, cluster: Cluster | None, taken: int | None) -> list[str]:
    """Return one sentence for each warning. `taken`: bytes of the fullest rank, None if the configuration was
    refused."""
    return list(_warnings(config, limit, cluster, taken))


def recipe_note(config: RunConfig) -> str | None:
    """Return a note on a ZeRO stage that the recipe's framework lacks, or does otherwise."""
    parallel = config.parallel
    shards = config.mesh.axes.size(*STATES)
    return find_recipe(parallel.recipe).note(parallel.zero_stage, config.precision.stored, config.mesh.pp, shards)


def _warnings(config: RunConfig, limit: Limit | None, cluster: Cluster | None, taken: int | None) -> Iterator[str]:
    device = None if limit is None else limit.device
    if device is not None and not device.has_bf16 and config.precision.stored == "bf16":
        yield f"{device.name} has no bf16 arithmetic: --precision fp16"
    tp, pp, micro_batches = config.mesh.tp, config.mesh.pp, config.data.accumulate
    if cluster is not None and tp > cluster.node_gpus:
        inside = next(size for size in range(cluster.node_gpus, 0, -1) if tp % size == 0)
        yield f"tp {tp} crosses nodes of {cluster.node_gpus} GPUs in every layer: --tp {inside}"
    if micro_batches < pp:
        few = counted(micro_batches, "microbatch", "microbatches")
        yield f"{few} for {pp} pipeline stages, some of which always wait: --accumulate {4 * pp}"
    yield from notes_of(config, "warned")
    if note := recipe_note(config):
        yield f"recipe {note}"
    if limit is not None and taken is not None:
        free = limit.nbytes - taken - limit.reserve(config)
        if 0 <= free < LITTLE * limit.nbytes:
            yield f"only {format_bytes(free)} ({100 * free / limit.nbytes:.1f} %) are free: {_roomier(config)}"


def warnings_text(found: Sequence[str]) -> RenderableType | None:
    """Return a line for each; nothing if there is none."""
    return Stack(*(prose(f"Warning: {text}.", "yellow") for text in found), close=True) if found else None


def _roomier(config: RunConfig) -> str:
    """Return the flag that decides whether a near miss fits after all, or that makes room."""
    if is_exact(config.memory):
        return "--allocator caching adds what an allocator leaves unused"
    if conf := without_fragmentation(config.memory):
        return f"--allocator-conf {conf} leaves less unused"
    return next(notes_of(config, "roomier"), "a higher --stage or a smaller --micro-batch makes room")
