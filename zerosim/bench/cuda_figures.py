"""From the rounds of a GPU benchmark to its figures: milliseconds, TFLOP/s, shares of a peak. Measures nothing.

A figure is the median over rounds, its spread the middle half; a ratio is the median of the ratios of single rounds,
as in `figures.py`. Flops are those that the run's kernels were recorded with, of all ranks together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zerosim.bench.cuda_turns import Rounds
from zerosim.bench.figures import Figure, quartiles, ratio
from zerosim.config.presets.hardware import Hardware
from zerosim.device.work import EAGER_PARTS, MATMULS

PRODUCTS = MATMULS | {name for name in EAGER_PARTS if name.startswith("attention_") and name != "attention_dropout"}
"""Kernels whose recorded flops are matrix products and nothing else."""


def product_flops(flops: Mapping[str, int]) -> int:
    return sum(count for name, count in flops.items() if name in PRODUCTS)


def step_time(model: str, name: str, rounds: Rounds) -> Figure:
    """Milliseconds of one step between device events; beside it the least of them and of the host's clock."""
    seconds = {"device": min(rounds.device_s), "host": min(rounds.host_s)}
    return _figure(model, name, [1e3 * s for s in rounds.device_s], "ms", seconds)


def speed(model: str, name: str, rounds: Rounds) -> Figure:
    """TFLOP/s over the whole step: all recorded flops of it by its seconds."""
    total, products = sum(rounds.flops.values()), product_flops(rounds.flops)
    note = f"{total / 1e12:.4g} TFLOP a step, {100 * products / max(1, total):.1f} % of it in matrix products"
    return _figure(model, name, [total / s / 1e12 for s in rounds.device_s], "TFLOP/s", note=note)


def share_of_peak(model: str, name: str, rounds: Rounds, hardware: Hardware | None, gpu: str | None) -> Figure:
    """The step's matrix products by its seconds, as a share of the device's published dense 16-bit peak."""
    if hardware is None:
        return Figure(model, name, None, "%", note=f"no published peak is known here for {gpu}")
    products = product_flops(rounds.flops)
    note = f"{hardware.name}: {hardware.peak_flops / 1e12:g} TFLOP/s dense"
    return _figure(model, name, [100 * products / s / hardware.peak_flops for s in rounds.device_s], "%", note=note)


def share_of_square(model: str, name: str, rounds: Rounds, square: Rounds) -> Figure:
    """The same share of what a large square product reached in the same round."""
    ours, bare = product_flops(rounds.flops), sum(square.flops.values())
    shares = [100 * (ours / s) / (bare / t) for s, t in zip(rounds.device_s, square.device_s, strict=True)]
    return _figure(model, name, shares, "%")


def over(
    model: str, name: str, measured: Mapping[str, Rounds], above: str, below: str, goal: float | None = None,
    note: str = "",
) -> Figure:  # fmt: skip
    """The ratio of two contestants' steps between device events."""
    return ratio(model, name, {key: measured[key].device_s for key in (above, below)}, above, below, goal, note)


def _figure(
    model: str,
    name: str,
    values: Sequence[float],
    unit: str,
    seconds: Mapping[str, float] | None = None,
    note: str = "",
) -> Figure:
    low, middle, high = quartiles(values)
    return Figure(model, name, middle, unit, None, low, high, len(values), seconds, note)
