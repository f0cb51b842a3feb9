"""What a device reaches in practice and how devices are linked: what the clock (`ledger/clock.py`) reads.

Peaks and bandwidths are the preset's (`hardware.py`); here is the share of them that a kernel gets, by how long it
would take at the peak, and what links carry. One curve for each device, none of it fitted to a measured step.

    matmul   B200: 214 products that were measured there, of the layers of six models (MooreThreads/SimuMax e691807,
             b200_bf16_ceperm.json); the shares of those within a factor of 2, harmonic means. Large ones get less than
             some small ones: under load the clock falls. Others: the ceiling is the best product that was measured on
             that device (MAMF); how much less a shorter product gets is Calculon's curve of an A100
             (calculon-ai/calculon caa4b11, a100.json: .95, .9, .6 and .1 of the peak at 128, 16, 1 and 0 GFLOP), read
             by time at the peak, so that a faster device wants larger ones
    flash    the best of a causal kernel, of the products that it does: FlashAttention-2 on A100, 73 % forward and 63 %
             backward (arXiv 2307.08691, recalled); FlashAttention-3 on H100, 75 % (2407.08608, recalled); B200, 64
             heads of 128 and 4,096 tokens in SimuMax's file, .44 and .36. Backward is 5 products of 7
    memory   the same file's: .9, .75, .6 and .3 at 100, 10, 1 and 0 MB of an A100's 2039 GB/s
    links    NCCL's own constants (NVIDIA/nccl 5067397, topo.h): 20, 20 and 20.6 GB/s for each NVLink; B200: what its
             all-gathers and reduce-scatters reached (SimuMax's file: .6735 of 900 GB/s; NCCL's constant is 40.1)
    a NIC    12 GB/s for each 100 Gb/s (the same file), shared by a node's GPUs; how many a node has is recalled
    PCIe     12 GB/s of a V100's PCIe 3 (the same file); derived, double with each generation after it
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from zerosim.config.presets.hardware import Hardware
from zerosim.config.presets.machine_file import Machine, Measured
from zerosim.errors import wrong

GB = 10**9
_A100_FLOPS, _A100_BYTES = 312e12, 2039e9
_MATMUL = ((1 * GB / _A100_FLOPS, 0.6), (16 * GB / _A100_FLOPS, 0.9), (128 * GB / _A100_FLOPS, 0.95))
_MEMORY = ((1e6 / _A100_BYTES, 0.6), (10e6 / _A100_BYTES, 0.75), (100e6 / _A100_BYTES, 0.9))
_LEAST_MATMUL, _LEAST_MEMORY = 0.1, 0.3
_B200_SHARES = (
    (3, 0.179), (7.6, 0.273), (15, 0.515), (30.5, 0.587), (59.2, 0.486), (122, 0.503), (237, 0.503), (443, 0.486),
    (958, 0.477), (1909, 0.474), (3374, 0.470), (7002, 0.486),
)  # fmt: skip
"""Microseconds at the peak, and the share of it."""
MAMF = "stas00/ml-engineering, Maximum Achievable Matmul FLOPS"
_BEST_V100 = "Markidis et al., arXiv 1803.04014: 83 TFLOP/s"
_BEST_A100, _BEST_H100 = f"{MAMF}: 271.2 of 312", f"{MAMF}: 794.5 of 989"


@dataclass(frozen=True, slots=True)
class Curve:
    """The share of a peak that a kernel reaches, by the seconds that it would take at the peak.

    `points` are (seconds, share), ascending. Between them the share is linear in the logarithm of time, below the first
    it falls to `least`, and above the last it stays. A kernel that does more never ends sooner.
    """

    points: tuple[tuple[float, float], ...]
    least: float

    def share(self, seconds: float) -> float:
        """Of the peak, for a kernel that takes so long at it."""
        first, last = self.points[0], self.points[-1]
        if seconds >= last[0]:
            return last[1]
        if seconds <= first[0]:
            return self.least + (first[1] - self.least) * seconds / first[0]
        for (low, below), (high, above) in zip(self.points, self.points[1:], strict=False):
            if seconds <= high:
                return below + (above - below) * math.log(seconds / low) / math.log(high / low)
        raise AssertionError(seconds)

    @property
    def most(self) -> float:
        """The highest share."""
        return max(share for _, share in self.points)

    def scaled(self, ceiling: float) -> Curve:
        """The same shape, with `ceiling` as its highest share."""
        by = ceiling / self.most
        return Curve(tuple((seconds, share * by) for seconds, share in self.points), self.least * by)


@dataclass(frozen=True, slots=True)
class Practice:
    """What one generation of GPUs reaches: shares of its peaks, its links, and a node of `node_gpus` of them.

    Bandwidths are in bytes per second and in one direction.

    flash  the highest share of the peak that a FlashAttention kernel gets
    link   all of a device's links to the others of its node
    nic    all of a node's NICs together, which its GPUs share
    pcie   between a device and its host

    `kernel_s`: seconds that a rank's own host takes for each kernel, 0 where it launches them ahead. `machine`: a
    machine that was measured; then its kernels and collectives take what they took there.
    """

    matmul: Curve
    flash: float
    source: str
    link: float
    pcie: float
    node_gpus: int
    nic: float
    memory: Curve = Curve(_MEMORY, _LEAST_MEMORY)
    latency: float = 1.0  # times NCCL's latencies; 0 for links that take none
    kernel_s: float = 0.0
    machine: Machine | None = None


def _calculons(ceiling: float) -> Curve:
    """Calculon's curve below the best product of a device."""
    return Curve(_MATMUL, _LEAST_MATMUL).scaled(ceiling)


_B200 = Curve(tuple((us * 1e-6, share) for us, share in _B200_SHARES), _LEAST_MATMUL)
_PRACTICE: Mapping[str, Practice] = MappingProxyType(
    {
        "v100": Practice(_calculons(83 / 125), 83 / 125, _BEST_V100, 120 * GB, 12 * GB, 16, 96 * GB),
        "a100": Practice(_calculons(0.869), 0.656, _BEST_A100, 240 * GB, 24 * GB, 8, 192 * GB),
        "h100": Practice(_calculons(0.803), 0.75, _BEST_H100, 370.8 * GB, 48 * GB, 8, 384 * GB),
        "h200": Practice(_calculons(0.803), 0.75, f"{_BEST_H100}, H100", 370.8 * GB, 48 * GB, 8, 384 * GB),
        "b200": Practice(_B200, 0.383, "214 products that SimuMax measured", 606 * GB, 48 * GB, 8, 384 * GB),
    }
)
"""By generation. Nodes: DGX-2 with eight 100 Gb/s NICs, DGX A100 with eight of 200, DGX H100 and later of 400."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Practice):
    """Devices of one kind, with their peaks, and how nodes of them are linked."""

    name: str
    peak_flops: float
    hbm: float

    def node_of(self, rank: int) -> int:
        return rank // self.node_gpus


def cluster_of(device: Hardware, *, node_gpus: int | None = None, nic_bytes_per_s: float | None = None) -> Cluster:
    """A cluster of these devices. Without a preset for the device: an A100's shares, its own links, and the
    NICs of an A100's node.

    Raises: InputError for a node of less than one GPU, and for a NIC that carries nothing.
    """
    if node_gpus is not None and node_gpus < 1:
        raise wrong("node_gpus", f" {node_gpus}: expected at least 1")
    if nic_bytes_per_s is not None and not nic_bytes_per_s > 0:
        raise wrong("nic", f" {nic_bytes_per_s}: expected bytes per second, more than 0")
    practice, given = _practice_of(device), {"node_gpus": node_gpus, "nic": nic_bytes_per_s}
    values = {of.name: getattr(practice, of.name) for of in fields(practice)}
    values |= {name: value for name, value in given.items() if value is not None}
    return Cluster(name=device.name, peak_flops=device.peak_flops, hbm=device.hbm_bytes_per_s, **values)


def _practice_of(device: Hardware) -> Practice:
    """Of a machine that was measured: all ranks on it, or on several like it with NICs between them."""
    peak, memory, link, machine = device.peak_flops, device.hbm_bytes_per_s, device.link_bytes_per_s, device.machine
    if machine is not None:
        shares = _curve_of(machine.product, peak), 1.0, machine.source
        links, curve = (link, memory, max(machine.cores, machine.ranks), math.inf), _curve_of(machine.memory, memory)
        return Practice(*shares, *links, curve, kernel_s=machine.kernel_s, machine=machine)
    if (known := _PRACTICE.get(device.name.split("-")[0])) is not None:
        return known
    return replace(_PRACTICE["a100"], link=link, source=f"assumed, of an A100: {MAMF}")


def _curve_of(measured: Measured, peak: float) -> Curve:
    return Curve(tuple((work / peak, work / seconds / peak) for work, seconds in measured.points), 0.0)
