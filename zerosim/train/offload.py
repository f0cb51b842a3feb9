"""Offloaded and paged states in a run: the memories of a node, and the folder on its drives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from zerosim.comm.runtime import Context
from zerosim.config import RunConfig
from zerosim.config.parts.paging import moves_pages
from zerosim.config.presets.cluster import Cluster
from zerosim.device.device import Kind
from zerosim.device.nvme import asks_for_folder
from zerosim.dtypes import fp32
from zerosim.models.model import Model
from zerosim.placement.memories import HOST, NVME


def moves_states(config: RunConfig) -> bool:
    """Return whether model states move between a rank's memories, when they are loaded or later. With offload gradient
    sums return from another memory from the second microbatch on."""
    return config.offload.is_on or moves_pages(config.memory) or config.offload.host_load != "none"


def node_memories(config: RunConfig, cluster: Cluster | None) -> dict[str, int | None]:
    """Return the bytes of a node's memories that limit a run; None: not known. A cluster's limit only states that
    move."""
    return node_has(config, cluster if moves_states(config) else None)


def node_has(config: RunConfig, cluster: Cluster | None) -> dict[str, int | None]:
    """Return the bytes of a node's memories beside the devices', as --host-memory or the cluster's node says; None: not
    known."""
    host, drives = (None, None) if cluster is None else (cluster.host_bytes, cluster.nvme_bytes)
    return {HOST: config.offload.host_memory or host, NVME: drives}


def by_loading(config: RunConfig, stands_for: Sequence[int]) -> list[int]:
    """Cut classes of ranks by whether their processes load the weights themselves."""
    first, local, loads = dict[tuple[int, bool], int](), config.mesh.local, config.offload.loads
    return [first.setdefault((lowest, loads(local(rank))), rank) for rank, lowest in enumerate(stands_for)]


@contextmanager
def loaded(ctx: Context, config: RunConfig, model: Model) -> Iterator[None]:
    """Hold all weights in fp32 in the host's memory inside the block, contents undefined, if this process loads them,
    and in the parameters' format on the device, if it has all of them first."""
    numel = sum(flat.spec.num_parameters for flat in model.flats)
    held = (
        [ctx.device.alloc((numel,), fp32, Kind.TEMP, memory=HOST)]
        if config.offload.loads(config.mesh.local(ctx.rank))
        else []
    )
    if config.offload.host_load == "device":
        held.append(ctx.device.alloc((numel,), model.dtype, Kind.TEMP))
    yield
    del held


def check_folder(config: RunConfig) -> None:
    """Check that a run that writes to NVMe has a folder there. Raises: InputError."""
    if config.offload.uses_nvme:
        asks_for_folder(config.offload.nvme, config.offload.where)


def folder_of(config: RunConfig) -> tuple[str | None, bool]:
    """Return the folder on the drives, if one is given, and whether the run writes there."""
    return config.offload.nvme, config.offload.uses_nvme
