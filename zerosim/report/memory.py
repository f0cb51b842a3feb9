"""The certainty of a plan that fits, in words: where measured runs of its class lie, and what an allocator would take.

The intervals are those of `analysis/memory_interval.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from zerosim.analysis.interval import Interval
from zerosim.analysis.memory_interval import ALLOCATED, DEVICE, ONE_GPU, MemoryClass, memory_interval, most_shown
from zerosim.config import RunConfig
from zerosim.config.parts.allocators import is_exact
from zerosim.report.interval import FRAMEWORKS
from zerosim.report.verdict import Limit, Planned
from zerosim.units import format_bytes


class Certainty(NamedTuple):
    """How sure a plan that fits is: its peak and its reserve in bytes, the intervals of what runs allocated and of what
    nvidia-smi showed, and the plan with the caching allocator, if it was close enough to ask."""

    peak: int
    limit: Limit
    reserve: int
    allocated: Interval[MemoryClass] | None
    shown: Interval[MemoryClass] | None
    cached: Planned | None = None

    @property
    def is_close(self) -> bool:
        """Whether as much as any measured run's allocator left unused would be too much."""
        return most_shown() * (self.peak + self.reserve) > self.limit.nbytes

    @property
    def doubts(self) -> list[str]:
        """The reasons why it may not fit, as sentences without a full stop."""
        found, room = [], self.limit.nbytes - self.reserve
        if self.allocated is not None and (high := self.allocated.high * self.peak) > room:
            found.append(
                f"uncertain: it fits by the count, but measured runs like it allocated up to {self.allocated.high:.3f} "
                f"of theirs, here {format_bytes(int(high))} of {format_bytes(room)}"
            )
        if self.cached is not None and self.cached.refusal is not None:
            found.append(
                f"uncertain: it fits by the count, but the caching allocator is refused ({self.cached.refusal}); "
                "--allocator-conf expandable_segments:True leaves less unused"
            )
        return found

    def lines(self) -> list[str]:
        """Return what measured runs say, and what the allocator would reserve."""
        found = []
        if (one := self.allocated) is not None:
            low, high = (format_bytes(round(end * self.peak)) for end in (one.low, one.high))
            found.append(
                f"8 of 10 measured runs like this one allocated {one.low:.3f} to {one.high:.3f} of the count: {low} to "
                f"{high} ({_class_words(one)})."
            )
        if (shown := self.shown) is not None:
            high = format_bytes(round(shown.high * (self.peak + self.reserve)))
            found.append(
                f"nvidia-smi showed {shown.low:.2f} to {shown.high:.2f} of it with CUDA's, up to {high}: an allocator "
                "keeps what is free."
            )
        if self.cached is not None and self.cached.refusal is None:
            reserved = format_bytes(self.cached.fullest.reserved_bytes)
            found.append(f"PyTorch's caching allocator would reserve {reserved} (--allocator caching).")
        return [" ".join(found)] if found else []

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: the ends of both intervals, the class, its rows, and whether it surely fits. What the
        allocator would reserve is in it close to the limit, whether or not a page asked for it."""
        one, shown = self.allocated, self.shown
        return {
            "allocated_low": None if one is None else round(one.low * self.peak),
            "allocated_high": None if one is None else round(one.high * self.peak),
            "class": None if one is None else one.of._asdict(),
            "rows": None if one is None else one.rows,
            "nvidia_smi_low": None if shown is None else round(shown.low * (self.peak + self.reserve)),
            "nvidia_smi_high": None if shown is None else round(shown.high * (self.peak + self.reserve)),
            "reserved": None if self.cached is None or not self.is_close else self.cached.fullest.reserved_bytes,
            "uncertain": bool(self.doubts),
        }


def certainty(config: RunConfig, limit: Limit | None, peak: int) -> Certainty | None:
    """Return how sure a plan is that fits a GPU; None without a GPU, and with an allocator of its own."""
    if limit is None or limit.device is None or limit.device.machine is not None or not is_exact(config.memory):
        return None
    if config.model.family == "flat":
        return None
    allocated, shown = memory_interval(config, ALLOCATED), memory_interval(config, DEVICE)
    return Certainty(peak, limit, limit.reserve(config), allocated, shown)


def _class_words(found: Interval[MemoryClass]) -> str:
    """Return '33 of FSDP1, LoRA'."""
    framework, trained, _ = found.of
    where = "on one GPU" if framework == ONE_GPU else f"of {FRAMEWORKS.get(framework, framework)}"
    return f"{found.rows} {where}, {trained}"
