"""Check this machine's memory and devices: a run that it cannot carry is refused here, before any rank starts.

The code that looks for GPUs is imported only for a run on GPUs.
"""

from __future__ import annotations

import os
from collections import Counter

from zerosim.comm.runtime import make_backend
from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.errors import InputError, wrong
from zerosim.models.model import Model
from zerosim.train.build_model import build_model
from zerosim.train.plan import plan
from zerosim.train.work import LONG_FLOPS, check_run, step_flops
from zerosim.units import format_bytes

_TOKEN_BYTES = 16
"""Bytes of a global batch, which a rank draws whole: each row's start and positions, int64."""


def check_libraries(config: RunConfig) -> None:
    """Check the backend's library, driver and devices. Raises: InputError with the command that mends it."""
    if config.world.backend != "cuda":
        return
    from zerosim.backends.cuda.check import check_cuda, check_graphs, check_nccl, check_precision

    check_cuda()
    if config.world.capture_graphs:
        check_graphs()
    check_precision(config.precision.stored)
    if config.world.algorithm == "native" and config.world.transport == "threads":
        _check_own_gpus(config)
        check_nccl()


def check_room_for(config: RunConfig, model: Model) -> None:
    """Check the memory of this machine and its GPUs. Raises: InputError with needed and available bytes."""
    if config.world.backend == "cuda":
        _check_gpus(config)
    else:
        _check_host(config, model)


def is_too_large(config: RunConfig, runs: int) -> bool:
    """Return whether the configuration is too large for this machine, or that many runs of it would take too long."""
    try:
        check_run(config)
        _check_host(config, build_model(config, Device(0, make_backend("meta"))))
    except InputError:
        return True
    return runs * step_flops(config) > LONG_FLOPS


def _local_ranks(config: RunConfig) -> int:
    """Return the number of ranks in this process."""
    return config.mesh.ranks if config.world.transport == "threads" else config.world.ranks_per_process


def _peak_bytes(config: RunConfig) -> list[int]:
    """Return each rank's peak, counted on shapes."""
    plain = config.replace(
        capacity=None, allocator="exact", allocator_conf=None, steps=1, bucket_bytes=None, collective="direct",
        backend="numpy", batched_flash=False, capture_graphs=False, world="threads", ranks_per_process=1,
    )  # fmt: skip
    return [memory.peak.total_bytes for memory in plan(plain).memory]


def _check_host(config: RunConfig, model: Model) -> None:
    """Check that this machine's memory holds every rank's bytes, if its size is known."""
    try:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return
    tokens = config.global_batch * (config.model.seq + 1)
    kept = tokens // config.data.accumulate * (config.model.vocab + config.model.layers * config.model.hidden)
    # far below the limit: states are 16 bytes, or 16/N
    if model.num_parameters * config.mesh.ranks + kept < there // 64:
        return
    local, needed = _local_ranks(config), model.num_parameters * model.flats[0].dtype.itemsize
    # the parameters alone, which all ranks together hold once, decide without a plan
    at_least = local == config.mesh.ranks and needed > there
    if not at_least:
        peaks = _peak_bytes(config)
        needed = sum(peaks) if local == config.mesh.ranks else max(peaks) * local
        needed += tokens * _TOKEN_BYTES
    if needed > there:
        raise InputError(
            f"{config.model.name} on {local} ranks needs {'at least ' * at_least}{format_bytes(needed)} to train, this "
            f"machine has {format_bytes(there)}: choose a smaller model, or count it on tensor shapes with zerosim plan"
        )


def _check_gpus(config: RunConfig) -> None:
    """Check each GPU: ranks are dealt out to GPUs in turn, and a GPU holds all of its ranks' bytes."""
    from zerosim.backends.cuda.check import check_room
    from zerosim.backends.cuda.facts import basic_facts

    num_gpus, local = basic_facts().num_gpus, _local_ranks(config)
    most = max(_peak_bytes(config))
    for gpu, sharing in sorted(Counter(rank % num_gpus for rank in range(local)).items()):
        check_room(gpu, sharing, most)


def _check_own_gpus(config: RunConfig) -> None:
    from zerosim.backends.cuda.facts import basic_facts

    num_gpus = basic_facts().num_gpus
    if config.mesh.ranks > num_gpus:
        raise wrong(
            "collective",
            f" native: NCCL needs a GPU for each of the {config.mesh.ranks} ranks, and this process sees {num_gpus}; "
            f"choose --collective direct, or --ranks {num_gpus}",
        )
