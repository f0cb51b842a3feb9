"""The uncertainty of a planned peak: an interval from measured runs, and whether a plan that fits surely does.

Three numbers of a GPU's memory are measured, and each has its name:

    allocated    the most that live tensors took at once: PyTorch's max_memory_allocated. zerosim's peak
    reserved     what its allocator had taken from the device for them: max_memory_reserved. --allocator caching
    nvidia-smi   what the device had given to all: reserved, and the CUDA context with its libraries (--gpu's reserve)

`memory_errors.toml` has ratios of measured runs to their plans: allocated to the peak, nvidia-smi to the peak and the
reserve. Their class is the framework, what is trained, and the number. A framework's rows say nothing of another one,
so classes of few rows are merged only over what adapters lie on.

A plan that fits is uncertain if a run at the upper end of its interval would not fit, or if the caching allocator,
which leaves memory unused between buffers, is refused on that device.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from zerosim.analysis.interval import Interval, Measured, interval
from zerosim.config import RunConfig
from zerosim.config.inputs import read_toml
from zerosim.config.parts.fp8 import is_in_8_bits

FILE = Path(__file__).parent / "memory_errors.toml"
ALLOCATED, DEVICE = "allocated", "nvidia-smi"
FULL, LORA, QLORA, ADAPTERS = "all weights trained", "LoRA", "QLoRA", "adapters"
ONE_GPU = "one GPU"


class MemoryClass(NamedTuple):
    """The properties of runs whose peaks have similar errors."""

    framework: str
    trained: str
    number: str

    def merges(self) -> tuple[MemoryClass, ...]:
        """Return this class and the class that it is merged into, in order."""
        return (self,) if self.trained == FULL else (self, self._replace(trained=ADAPTERS))

    def belongs(self, of: MemoryClass) -> bool:
        """Return whether this class belongs to a merged one."""
        is_like = of.trained in (self.trained, FULL if self.trained == FULL else ADAPTERS)
        return is_like and (of.framework, of.number) == (self.framework, self.number)


MeasuredPeak = Measured[MemoryClass]


def memory_class(config: RunConfig, number: str) -> MemoryClass:
    """Return the class of a plan. On one GPU no framework divides anything; Megatron-LM's own blocks stay its own."""
    recipe, tuning = config.parallel.recipe, config.tuning
    framework = ONE_GPU if config.mesh.ranks == 1 and recipe != "megatron" else recipe
    return MemoryClass(framework, FULL if not tuning.is_on else QLORA if tuning.base else LORA, number)


def memory_interval(config: RunConfig, number: str) -> Interval[MemoryClass] | None:
    """Return the interval of a plan's peak, for one of the measured numbers; None if no such run was measured."""
    if config.parallel.recipe == "paper" or not config.model.has_blocks or config.offload.is_on:
        return None
    if is_in_8_bits(config.fp8):
        return None
    return interval(memory_class(config, number), read_peaks())


@lru_cache
def read_peaks() -> tuple[MeasuredPeak, ...]:
    """Return every row of `memory_errors.toml`."""
    rows = read_toml(FILE, "measured peaks")["rows"]
    return tuple(Measured(name, MemoryClass(*of), ratio) for name, *of, ratio in rows)


def most_shown() -> float:
    """Return the most that nvidia-smi showed of any measured run, over its plan's peak and reserve; 1 of none."""
    return max((math.exp(row.log_ratio) for row in read_peaks() if row.of.number == DEVICE), default=1.0)
