"""Costs of a machine that `zerosim calibrate` measured: kernels and collectives take their measured times."""

from __future__ import annotations

from functools import lru_cache

from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.machine_file import Machine
from zerosim.device.events import Copy, Kernel, Launch
from zerosim.device.work import MATMUL
from zerosim.ledger.costs import copy_seconds, cpu_seconds, network_seconds, sent_share, topology
from zerosim.placement.memories import DEVICE
from zerosim.verbs import find_verb


class MachineCosts:
    """The host of such a machine does not run ahead: its work between two kernels is part of a kernel's time."""

    graph = 0.0
    chunks = 1
    side_stream = False
    contention = 0.0

    def __init__(self, machine: Machine, cluster: Cluster) -> None:
        self.machine, self.cluster = machine, cluster
        self._place = lru_cache(maxsize=None)(lambda group: topology(group, cluster))

    def kernel(self, kernel: Kernel) -> float:
        if kernel.place != DEVICE and self.cluster.cpu_known:  # as many ranks stepped together as were measured
            return cpu_seconds(kernel, self.cluster, self.machine.ranks) + self.machine.kernel_s
        flops = kernel.flops if kernel.engine == MATMUL else 0
        nbytes = kernel.bytes_read + kernel.bytes_written
        return self.machine.kernel_seconds(kernel.name, flops, nbytes) + self.machine.kernel_s

    def launch(self, kernel: Kernel) -> float:
        return 0.0

    def call(self, event: Launch | Copy) -> float:
        return 0.0

    def collective(self, launch: Launch) -> float:
        """Return the call's measured time between the measured ranks; other numbers of ranks move a ring's bytes.
        Between machines it takes at least the latency and the time of its bytes over the NIC."""
        place, payload = self._place(launch.group), launch.payload_bytes
        if payload == 0 or place.members == 1:
            return 0.0
        verb, share = find_verb(launch.op), sent_share(launch, place.members)
        measured = self.machine.collectives[verb.curve]
        seconds = measured.seconds(payload * share / verb.share(self.machine.ranks))
        if place.nodes == 1:
            return seconds
        return max(seconds, measured.points[0][1] + network_seconds(launch, place, self.cluster))

    def copy(self, copy: Copy) -> float:
        return copy_seconds(copy, self.cluster, 1)
