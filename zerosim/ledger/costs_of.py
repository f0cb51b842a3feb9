"""Whose costs a cluster has: those of GPUs, or of a machine that was measured."""

from __future__ import annotations

from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.machine_file import Machine
from zerosim.ledger.costs import Costs
from zerosim.ledger.gpu_costs import GpuCosts
from zerosim.ledger.machine_costs import MachineCosts


def costs_of(config: RunConfig, cluster: Cluster) -> Costs:
    """What a step of this configuration costs there."""
    if isinstance(cluster.measured, Machine):
        return MachineCosts(cluster.measured, cluster)
    return GpuCosts(cluster.measured, cluster, config)
