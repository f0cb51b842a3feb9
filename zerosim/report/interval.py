"""The certainty of a modelled step, in words: the interval of eight of ten measured steps of its class, or that none
was measured.

The intervals are those of `analysis/step_interval.py`. A measured machine has its own error, in its file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from zerosim.analysis.interval import Interval, overlaps
from zerosim.analysis.step_interval import StepClass, step_interval
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.published import best_published
from zerosim.ledger.clock import StepTime
from zerosim.report.names import listed

FRAMEWORKS: Mapping[str, str] = MappingProxyType(
    {
        "": "any framework",
        "fsdp1": "FSDP1",
        "fsdp2": "FSDP",
        "megatron": "Megatron-LM",
        "deepspeed": "DeepSpeed",
        "ddp": "DDP",
    }
)
NEVER = "Modelled, never compared: too few steps like this one were measured"


def three_figures(value: float) -> str:
    """Return 160168 as '160,000', 0.05115 as '0.0512'."""
    return f"{float(f'{value:.3g}'):,.10g}"


def band(config: RunConfig, time: StepTime, cluster: Cluster) -> tuple[float, float] | None:
    """Return the seconds between which eight of ten measured steps like this one would lie."""
    found = step_interval(config, time, cluster)
    return None if found is None else (found.low * time.seconds, found.high * time.seconds)


def class_words(of: StepClass, rows: int) -> str:
    """Return '14 of FSDP on A100, 2B to 20B'."""
    framework = FRAMEWORKS.get(of.recipe, of.recipe)
    parts = [
        f"{rows} of {framework} on {of.gpu.upper() or 'any GPU'}",
        of.size,
        "which the host decides" if of.host_bound else "",
        "adapters" * of.adapters,
        "context parallelism" * of.context,
        "experts" * of.experts,
    ]
    return ", ".join(filter(None, parts))


def interval_words(found: Interval[StepClass], seconds: float) -> str:
    """Return '2.38 to 3.12 s for 8 of 10 measured steps like this one: 14 of FSDP on A100'."""
    low, high = (three_figures(seconds * end) for end in (found.low, found.high))
    return f"{low} to {high} s for 8 of 10 measured steps like this one: {class_words(found.of, found.rows)}"


def interval_values(config: RunConfig, time: StepTime, cluster: Cluster) -> dict[str, Any]:
    """Return the JSON form: the ends, the class and its number of rows; all None if no such step was measured."""
    found = step_interval(config, time, cluster)
    if found is None:
        return dict.fromkeys(("step_s_low", "step_s_high", "interval_class", "interval_rows"))
    return {
        "step_s_low": found.low * time.seconds,
        "step_s_high": found.high * time.seconds,
        "interval_class": found.of._asdict(),
        "interval_rows": found.rows,
    }


def trust(cluster: Cluster, *found: Interval[StepClass] | None) -> str:
    """Return the last sentence under modelled seconds."""
    if cluster.machine is not None:
        error = cluster.machine.known_error
        return f"Modelled, not measured. Known error: {error}." + (
            " Negative: real steps took longer." * ("-" in error)
        )
    if None in found:
        return f"{NEVER}."
    classes = dict.fromkeys(class_words(one.of, one.rows) for one in found if one is not None)
    return f"Modelled, not measured. Compared with measured steps: {listed(list(classes))}."


def implausible(config: RunConfig, mfu: float, cluster: Cluster) -> str | None:
    """Return a warning if no publication reached as much; None for a measured machine."""
    best = None if cluster.machine is not None else best_published(cluster.name, config.fp8)
    if best is None or mfu <= best.mfu:
        return None
    return (
        f"Implausible: an MFU of {100 * mfu:.1f} % is above the best published one that we know for this GPU, "
        f"{100 * best.mfu:.1f} % ({best.source})."
    )


def not_ranked(bands: Sequence[tuple[float, float] | None]) -> int:
    """Return how many steps after the first cannot be distinguished from it. Without its band: all."""
    first, *others = bands
    return sum(other is None or first is None or overlaps(first, other) for other in others)
