"""The world of a run: its ranks, their devices and nodes."""

from __future__ import annotations

from pathlib import Path

from zerosim.comm.runtime import World
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.device.allocators.choose import make_allocator
from zerosim.device.memory import Allocator
from zerosim.train.offload import node_memories


def world_of(
    config: RunConfig, *, keep_events: bool = False, folder: Path | None = None, cluster: Cluster | None = None
) -> World:
    """Return the world of a run: on one node or, with a `cluster`, on its nodes. Data on NVMe are files in
    `folder`."""
    return World(
        ranks=config.mesh.ranks,
        max_running=config.world.max_running,
        backend=_backend(config),
        transport=config.world.transport,
        per_process=config.world.ranks_per_process,
        algorithm=config.world.algorithm,
        bucket_bytes=config.parallel.bucket_bytes,
        capacity=config.memory.capacity,
        allocator=config.memory.allocator,
        allocator_conf=config.memory.allocator_conf,
        node_ranks=node_ranks(config, cluster),
        others=node_memories(config, cluster),
        folder=folder,
        keep_events=keep_events,
    )


def _backend(config: RunConfig) -> str:
    """Return the name of the backend's class, with the options that choose another one."""
    return config.world.backend + "-batched" * config.memory.batched_flash + "-graphs" * config.world.capture_graphs


def new_allocator(config: RunConfig) -> Allocator:
    """Make the allocator of a rank's device, without the device."""
    world = world_of(config)
    return make_allocator(world.allocator, world.capacity, world.allocator_conf)


def node_ranks(config: RunConfig, cluster: Cluster | None) -> int:
    """Return how many neighbouring ranks share a node: a cluster's GPUs per node, else `--ranks-per-node`, or all."""
    return min(config.mesh.ranks, cluster.node_gpus if cluster else config.mesh.ranks_per_node or config.mesh.ranks)
