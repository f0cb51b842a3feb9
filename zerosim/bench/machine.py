"""The machine of a benchmark: its hardware, the load of other programs meanwhile, and the sizes that fit on its GPU.

`backends/cuda/check.py` checks whether a GPU can be used at all.
"""

from __future__ import annotations

import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

from zerosim.backends.cuda.check import check_precision, version_text
from zerosim.backends.cuda.facts import cuda_facts, find_gpu
from zerosim.bench import pytorch
from zerosim.bench.training import RANKS, over_ranks
from zerosim.config import RunConfig
from zerosim.config.presets.hardware import Hardware, find_hardware
from zerosim.errors import InputError
from zerosim.train.plan import plan
from zerosim.units import format_bytes

JIFFIES_PER_S = 100  # the unit of /proc/stat (USER_HZ), which does not depend on the kernel's clock

ROWS = (8, 4)
"""Rows of the global batch on a GPU, tried in this order. Each is a multiple of four, for four ranks."""

LIBRARIES_BYTES = 10**9
"""Bytes for CUDA's context, kernels, and cuBLAS's workspaces of both frameworks."""

STATE_BYTES = 20
"""Bytes per parameter between steps on the larger side (PyTorch: 2 + 2, and 16 in fp32)."""

SPARE = 1.5
"""A step's allowance beyond the bytes that zerosim counts: PyTorch's temporaries, and gaps in pools."""


class OtherLoad:
    """The load of other processes since this object was made. A figure measured beside a busy program is worth less.

    Reads /proc/stat; without it the load is unknown.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._busy_s = busy_s()
        self._own_s = own_s()

    def share(self) -> float | None:
        """Return the share of all cores' time that other processes used, 0 to 1."""
        busy = busy_s()
        if busy is None or self._busy_s is None:
            return None
        passed_s = (time.perf_counter() - self._started) * (os.cpu_count() or 1)
        others_s = busy - self._busy_s - (own_s() - self._own_s)
        return round(min(1.0, max(0.0, others_s / passed_s)), 3)


def busy_s() -> float | None:
    """Return the busy seconds of all cores since boot."""
    try:
        words = Path("/proc/stat").read_text("utf-8").split("\n", 1)[0].split()
        user, nice, system, _idle, _wait, *interrupts_and_steal = map(int, words[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(interrupts_and_steal)) / JIFFIES_PER_S


def own_s() -> float:
    """Return the CPU seconds of this process and its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def describe(backend: str) -> dict[str, Any]:
    """Describe the hardware of the figures: the processor, or GPU 0 (memory in bytes); versions as text."""
    if backend == "numpy":
        pools = threadpool_info()
        return {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "blas": [f"{pool['internal_api']} {pool['version']}" for pool in pools if pool["user_api"] == "blas"],
            "torch": pytorch.version(),
        }
    facts, gpu = cuda_facts(probe=False), find_gpu(0)
    return {
        "gpu": gpu.name if gpu else None,
        "gpus": facts.num_gpus,
        "compute_capability": gpu.compute_capability if gpu else None,
        "memory_bytes": gpu.memory_bytes if gpu else None,
        "free_bytes": gpu.free_bytes if gpu else None,
        "driver": _driver(),
        "driver_cuda": _version(facts.driver_version),
        "cupy": facts.cupy,
        "cupy_cuda": _version(facts.runtime_version),
        "torch": pytorch.version(),
    }


def described(machine: dict[str, Any]) -> str:
    """Return 'Device: NVIDIA H100 80GB HBM3 (compute capability 9.0), driver 580.65.06 for CUDA 13.0, CuPy ...'."""
    if "gpu" not in machine:
        return f"Machine: {', '.join(f'{key} {value}' for key, value in machine.items())}"
    driver = " ".join(part for part in ("driver", machine["driver"]) if part)
    return (
        f"Device: {machine['gpu']} (compute capability {machine['compute_capability']}), {driver} for CUDA "
        f"{machine['driver_cuda']}, CuPy {machine['cupy']} for CUDA {machine['cupy_cuda']}, "
        f"PyTorch {machine['torch'] or 'not installed'}"
    )


def _version(number: int | None) -> str | None:
    return None if number is None else version_text(number)


def _driver() -> str | None:
    """Return '580.65.06' from the kernel module; None if it does not say."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text("utf-8")
    except OSError:
        return None
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else None


def published(name: str | None) -> Hardware | None:
    """Return the device of that name with its published peak, None if zerosim does not know it."""
    try:
        return find_hardware(name) if name and "/" not in name else None
    except InputError:
        return None


def precision_fault(precision: str) -> str:
    """Return '' if this GPU and CuPy multiply that dtype on tensor cores, else the reason to leave it out."""
    try:
        check_precision(precision)
    except InputError as error:
        return str(error)
    gpu = find_gpu(0)
    if precision == "bf16" and gpu is not None and int(gpu.compute_capability.split(".")[0]) < 8:
        return f"bf16 needs compute capability 8.0, {gpu.name} has {gpu.compute_capability}"
    return ""


def fitting(model: str, config: RunConfig, square: int) -> RunConfig:
    """Return `config` with the most rows that fit on GPU 0.

    Raises: InputError with the needed and the free memory, if the fewest rows do not fit.
    """
    gpu = find_gpu(0)
    if gpu is None:
        return config
    for rows in ROWS:
        tried = config.replace(micro_batch=rows)
        needed = needed_bytes(tried, square)
        if needed <= gpu.free_bytes:
            return tried
    raise InputError(
        f"bench --backend cuda: {model} on {ROWS[-1]} rows needs {format_bytes(needed)} and "
        f"{format_bytes(gpu.free_bytes)} of {gpu.name} are free: nvidia-smi shows which process uses it; or pass "
        "--model small"
    )


def needed_bytes(config: RunConfig, square: int) -> int:
    """Count on shapes the bytes alive at once while the largest contestant works: two runs' states beside four ranks,
    or five beside one rank."""
    alone, shared = plan(config), plan(over_ranks(config))
    states = STATE_BYTES * alone.num_parameters
    one = int(SPARE * alone.memory[0].peak.total_bytes) + 5 * states + 6 * square**2
    most = max(memory.peak.total_bytes for memory in shared.memory)
    four = int(SPARE * RANKS * most) + 2 * states
    return max(one, four) + LIBRARIES_BYTES
