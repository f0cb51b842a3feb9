"""`--recompute auto`: choose the recompute before anything is planned, with the device that a verb's flags name."""

from __future__ import annotations

import argparse

from zerosim.cli.device import device_limit, node_of
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.recompute import AUTO
from zerosim.errors import InputError

TIMED_BY = "a100-80"
"""The GPU whose seconds decide where only a limit is given."""


def resolved(args: argparse.Namespace, config: RunConfig) -> RunConfig:
    """Return the configuration with the recompute that --recompute auto chooses; where nothing fits, with the most.

    Raises: InputError without a device memory.
    """
    if config.value("recompute") != AUTO:
        return config
    limit = device_limit(args, config.memory.capacity)
    if limit is None:
        which = "--gpu NAME or --limit SIZE" if hasattr(args, "gpu") else "--limit SIZE"
        raise InputError(f"--recompute auto: needs a device memory to fit into; pass {which} too")
    from zerosim.analysis.auto_recompute import auto

    cluster = cluster_of(find_hardware(TIMED_BY)).without_limits()
    if limit.device is not None:
        how = {"node_gpus": getattr(args, "node_gpus", None), "nic_bytes_per_s": getattr(args, "nic", None)}
        cluster = cluster_of(limit.device, node=node_of(args), **how)
    found = auto(config, max(1, limit.nbytes - limit.reserve(config)), cluster)
    return config.replace(recompute="full") if found is None else found
