"""Costs of a GPU: measured kernels and collectives (`config/presets/`), and a host that launches them.

A kernel takes the longer of its arithmetic and its memory traffic. Arithmetic reaches the measured share of the peak of
a product of its direction and size, or of an attention kernel of that implementation, head width, length and number of
heads. A product in 8 bits reaches a share of the peak of 8 bits, by what numbers share a scale. Experts' products are
one kernel, and each has the size of its expert's rows. Memory traffic takes a latency, and a share of the bandwidth. An
operator that the framework runs as several kernels moves more bytes and has as many launches
(`config/presets/operators.py`).

The host takes a few microseconds for each kernel. Measured per operator, in microseconds: 2 to 7 for the simplest of
PyTorch (pytorch/pytorch#41383; the most is taken), 27 to 34 for one that Python wraps (pytorch/helion#3629, the least
is taken, because it waits for the device once), 6.8 for a kernel of torch.compile (meta-pytorch/tritonbench#1017).

Transformer Engine launches a product for each expert in one call, and PyTorch one kernel for all. The driver takes 3
microseconds for a kernel (tritonbench#1017).

A CUDA graph is one launch: Megatron captures a layer's forward and its backward (core/transformer/cuda_graphs.py),
torch.compile a compiled region. The host takes 44.3 microseconds to call a compiled graph, guards and arguments
included (tritonbench#1017, for a graph of one kernel; no source has the time of a long one). A block's
launches together take at most that time.
"""

from __future__ import annotations

from functools import lru_cache

from zerosim.config import RunConfig
from zerosim.config.parts.fp8 import casts_by_rows, check_units, has_own_casts
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.kernel_tables import KernelTables
from zerosim.config.presets.operators import operators
from zerosim.device.copies import CONTROL
from zerosim.device.events import Copy, Kernel, Launch
from zerosim.device.work import GROUPED_WGRAD, LINEAR, MATMUL, OF_LINEAR
from zerosim.ledger.collectives import collective_seconds
from zerosim.ledger.costs import copy_seconds, cpu_seconds, is_captured, topology
from zerosim.ledger.experts import relayed_seconds, relays, shares_of
from zerosim.placement.memories import DEVICE
from zerosim.placement.mesh import CUTS

US = 1e-6
LAUNCH, WRAPPED, COMPILED, GRAPH, DRIVER = 7 * US, 27 * US, 6.8 * US, 44.3 * US, 3 * US
CONTENTION = 0.15 / 0.85
"""A collective in flight takes 15 % of the multiprocessors (calculon-ai/calculon caa4b11, a100.json)."""
_LOSSES = ("cross_entropy", "cross_entropy_shares", "cross_entropy_backward")
_FLASH = {"flash_attention": 2, "flash_attention_backward": 5}  # products
_PERMUTES = ("take_rows", "sum_rows")
_RESCALED = ("linear_dgrad_fp8_rows", "linear_wgrad_fp8_rows")
"""torchao computes these without the rows' scales, and another kernel multiplies the result by them (pytorch/ao#1325):
the product that takes scales of rows is slow if it adds in fp32, as gradients' do."""
_TILE = 128


class GpuCosts:
    """One GPU's tables, and a framework's kernels on it."""

    def __init__(self, tables: KernelTables, cluster: Cluster, config: RunConfig) -> None:
        check_units(config.fp8, cluster.name, cluster.fp8_flops, has_mxfp8=True)
        self.tables, self.cluster, self.kernels = tables, cluster, config.clock.kernels
        self.sharers = min(config.mesh.ranks, cluster.node_gpus)  # ranks of a node
        self.contention = CONTENTION * cluster.contention
        self.chunks = config.mesh.tp if config.clock.tp_comm_overlap else 1
        self.side_stream = config.clock.overlap_comm
        self.graph = GRAPH * cluster.host if config.clock.cuda_graphs else 0.0
        self.operators = operators(
            self.kernels,
            loss=config.memory.loss,
            foreach=config.optim.foreach,
            by_rows=casts_by_rows(config.fp8),
            own_casts=has_own_casts(config.fp8),
        )
        self.relays = relays(config)
        runs = None if "flash_kernel" in config.given else cluster.flash_kernel
        self.flash_kernel = tables.flash_kernel(runs or config.clock.flash_kernel)
        self._place = lru_cache(maxsize=None)(lambda group: topology(group, cluster))
        self._shares = lru_cache(maxsize=None)(lambda place: shares_of(config, place))

    def kernel(self, kernel: Kernel) -> float:
        if kernel.place != DEVICE:
            return cpu_seconds(kernel, self.cluster, self.sharers)
        rescaled = self._moving(2 * kernel.bytes_written, 1) if kernel.name in _RESCALED else 0.0
        return max(self._arithmetic(kernel), self._traffic(kernel)) + rescaled

    def launch(self, kernel: Kernel) -> float:
        launches = self.operators[kernel.name].launches + (kernel.name in _RESCALED)
        if self.kernels == "fused" and kernel.name in self.tables.grouped:
            return max(WRAPPED, kernel.shape[-1] * DRIVER) * self.cluster.host
        each = COMPILED if self.kernels == "compiled" else LAUNCH
        least = WRAPPED if launches and self.kernels != "compiled" else 0.0
        return max(least, launches * each) * self.cluster.host

    def call(self, event: Launch | Copy) -> float:
        """Return 0 for a call inside a graph: tensor parallelism's, between the kernels of a block."""
        is_inside = self.graph and isinstance(event, Launch) and event.axis in CUTS and is_captured(event.scope)
        return 0.0 if is_inside else WRAPPED * self.cluster.host

    def collective(self, launch: Launch) -> float:
        place = self._place(launch.group)
        shares = self._shares(place)
        if shares is not None and launch.axis == "ep" and launch.op == "all_to_all" and launch.purpose != CONTROL:
            return relayed_seconds(launch, place, self.cluster, shares)
        return collective_seconds(launch, place, self.cluster)

    def copy(self, copy: Copy) -> float:
        return copy_seconds(copy, self.cluster, self.sharers)

    def _arithmetic(self, kernel: Kernel) -> float:
        if kernel.engine != MATMUL or not kernel.flops:
            return 0.0
        narrow = self.tables.narrow.at(min(kernel.shape)) if kernel.shape else 1.0
        if (plain := OF_LINEAR.get(kernel.name)) is not None:
            reached = self.tables.eight_bits.get(kernel.name, self.tables.products[plain])
            return reached.seconds(kernel.flops / self.cluster.fp8_flops) / narrow
        at_peak = kernel.flops / self.cluster.peak_flops
        if kernel.name in _FLASH and kernel.shape:
            if len(kernel.shape) == 5:
                return at_peak / 2 / self._flash_share(kernel)  # without the blocks above the diagonal
            batch, heads, _, _, width, scores = kernel.shape
            flops = 2 * _FLASH[kernel.name] * batch * heads * width * scores
            return flops / self.cluster.peak_flops / self._flash_share(kernel)
        if kernel.name in self.tables.grouped:
            return self._grouped(kernel, at_peak)
        return self.tables.products.get(kernel.name, self.tables.products[LINEAR]).seconds(at_peak) / narrow

    def _grouped(self, kernel: Kernel, at_peak: float) -> float:
        """Return the seconds of the products of all experts, which share the rows evenly: each is as slow as its own
        size and widths make it."""
        rows, inner, wide, experts = kernel.shape
        widths = (rows, wide) if kernel.name == GROUPED_WGRAD else (inner, wide)  # of a weight gradient rows are inner
        each = self.tables.grouped[kernel.name].seconds(at_peak / experts)
        return experts * each / self.tables.narrow.at(min(widths))

    def _flash_share(self, kernel: Kernel) -> float:
        batch, heads, _, tokens, width = kernel.shape[:5]
        flash, tiles = self.tables.flash(self.flash_kernel, width), batch * heads * -(-tokens // _TILE)
        if kernel.name == "flash_attention":
            return flash.forward.at(tokens) * self.tables.tiles.forward.at(tiles)
        return flash.backward.at(tokens) * self.tables.tiles.backward.at(tiles)

    def _traffic(self, kernel: Kernel) -> float:
        """Return the seconds of memory traffic of a kernel, or of the framework's kernels for it: each moves its share
        of the bytes."""
        operator = self.operators[kernel.name]
        if self.relays and kernel.name in _PERMUTES:
            return 0.0
        share = self.tables.moved
        if kernel.name in _LOSSES:
            share = self.tables.cross_entropy
        elif kernel.name in _PERMUTES:
            share = self.tables.permuted
        return self._moving((kernel.bytes_read + kernel.bytes_written) * operator.traffic, operator.launches, share)

    def _moving(self, nbytes: float, launches: int, share: float | None = None) -> float:
        """Return the seconds of so many kernels that move these bytes together, at a share of the bandwidth."""
        late = launches * self.tables.latency_s if nbytes else 0.0
        return nbytes / self.cluster.hbm / (share or self.tables.moved) + late
