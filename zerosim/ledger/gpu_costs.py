"""Costs of a GPU: kernels and collectives as they were measured (`config/presets/`), a host that launches.

A kernel takes the longer of its arithmetic and its memory traffic. Arithmetic reaches the share of the peak that a
product of its direction and size was measured to reach, or an attention kernel of that implementation, head width,
length and number of heads; memory traffic that of an element-wise kernel of its size. What the framework runs as
several kernels moves more bytes and is launched as often (`config/presets/operators.py`).
"""

from __future__ import annotations

from functools import lru_cache

from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.kernel_tables import KernelTables
from zerosim.device.events import Copy, Kernel, Launch
from zerosim.device.work import LINEAR, MATMUL
from zerosim.ledger.collectives import collective_seconds
from zerosim.ledger.costs import topology

CONTENTION = 0.15 / 0.85
"""A collective in flight takes 15 % of the multiprocessors (calculon-ai/calculon caa4b11, a100.json)."""
_LOSSES = ("cross_entropy", "cross_entropy_shares", "cross_entropy_backward")
_FLASH = ("flash_attention", "flash_attention_backward")
_TILE = 128


class GpuCosts:
    """One GPU's tables, and whose attention kernel runs."""

    def __init__(self, tables: KernelTables, cluster: Cluster, flash_kernel: str) -> None:
        self.tables, self.cluster, self.flash_kernel = tables, cluster, flash_kernel
        self.contention = CONTENTION
        self.call = 0.0
        self._place = lru_cache(maxsize=None)(lambda group: topology(group, cluster))

    def kernel(self, kernel: Kernel) -> float:
        return max(self._arithmetic(kernel), self._traffic(kernel))

    def launch(self, kernel: Kernel) -> float:
        return 0.0

    def collective(self, launch: Launch) -> float:
        return collective_seconds(launch, self._place(launch.group), self.cluster)

    def copy(self, copy: Copy) -> float:
        return copy.nbytes / self.cluster.pcie

    def _arithmetic(self, kernel: Kernel) -> float:
        if kernel.engine != MATMUL or not kernel.flops:
            return 0.0
        at_peak = kernel.flops / self.cluster.peak_flops
        if kernel.name in _FLASH and kernel.shape:
            return at_peak / 2 / self._flash_share(kernel)  # the blocks above the diagonal are skipped
        narrow = self.tables.narrow.at(min(kernel.shape)) if kernel.shape else 1.0
        return self.tables.products.get(kernel.name, self.tables.products[LINEAR]).seconds(at_peak) / narrow

    def _flash_share(self, kernel: Kernel) -> float:
        batch, heads, _, tokens, width = kernel.shape
        flash, tiles = self.tables.flash(self.flash_kernel, width), batch * heads * -(-tokens // _TILE)
        if kernel.name == _FLASH[0]:
            return flash.forward.at(tokens) * self.tables.tiles.forward.at(tiles)
        return flash.backward.at(tokens) * self.tables.tiles.backward.at(tiles)

    def _traffic(self, kernel: Kernel) -> float:
        nbytes = kernel.bytes_read + kernel.bytes_written
        if not nbytes:
            return 0.0
        seconds = self.tables.elementwise.seconds(nbytes / self.cluster.hbm)
        return seconds / self.tables.cross_entropy if kernel.name in _LOSSES else seconds
