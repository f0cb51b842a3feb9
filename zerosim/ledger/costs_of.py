"""The costs of a cluster: those of GPUs, or of a calibrated machine."""

from __future__ import annotations

from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.machine_file import Machine
from zerosim.errors import InputError
from zerosim.ledger.costs import Costs
from zerosim.ledger.gpu_costs import GpuCosts
from zerosim.ledger.machine_costs import MachineCosts


def costs_of(config: RunConfig, cluster: Cluster) -> Costs:
    """Return the costs of a step of this configuration on the cluster. Raises: InputError for several GPUs to a node
    without links."""
    if config.mesh.ranks > 1 and cluster.node_gpus > 1 and not cluster.link:
        raise InputError(
            f"{cluster.name} has no links between GPUs, and {config.mesh.ranks} ranks need them: give its file "
            'link_bytes_per_s, such as "24GB", or pass --node-gpus 1, or --ranks 1'
        )
    if isinstance(cluster.measured, Machine):
        return MachineCosts(cluster.measured, cluster)
    return GpuCosts(cluster.measured, cluster, config)
