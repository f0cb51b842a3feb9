"""Number formats looked at: every number that 16 bits can hold, what falls between them, and a line fitted in them.

Owns the experiments and pictures of notebook 02. Rounding is that of zerosim's own casts
(`tensor(..., dtype=...)`), the update that of `optim/adam.py`; limits are found by counting bit
patterns, not taken from `dtypes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.analysis.advice import run
from zerosim.config import RunConfig
from zerosim.dtypes import dtype as dtype_of
from zerosim.errors import InputError
from zerosim.lessons.sheet import Sheet, ink_on, open_sheet, picture, write
from zerosim.optim.adam import Adam
from zerosim.report.plots.page import Picture, dress, frame, open_page
from zerosim.report.plots.style import LINE_PAINTS, mixed
from zerosim.tensor.tensor import cpu, tensor

FORMATS = ("fp16", "bf16", "fp32")
_LOG_LOW, _LOG_HIGH = -152, 132
_NOISE = 1e-14
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a format can hold: its smallest positive number, the smallest with all its digits, its largest, and the
    gap between 1 and the next number."""

    name: str
    nbytes: int
    smallest: float
    min_normal: float
    largest: float
    gap_at_one: float


def half_values(name: str) -> Any:
    """Every positive finite number of a 16-bit format, rising, as float32: read from its 2**15 bit patterns.

    Raises: InputError for a format of another size.
    """
    patterns = np.arange(1, 2**15, dtype=np.uint16)
    if name == "fp16":
        values = patterns.view(np.float16).astype(np.float32)
    elif name == "bf16":  # the upper half of a float32
        values = (patterns.astype(np.uint32) << 16).view(np.float32)
    else:
        raise InputError(f"format {name!r}: expected fp16 or bf16, whose bit patterns are few enough to count")
    return values[np.isfinite(values)]


def limits(name: str) -> Limits:
    """A format's limits, seen in its numbers: a number has all its digits where gaps have begun to grow with size."""
    nbytes = dtype_of(name).itemsize
    if nbytes == 2:
        values = half_values(name).astype(np.float64)
        gaps = np.diff(values)
        growth = int(np.argmax(gaps > gaps[0]))  # from here on the gap is twice that of the octave before
        return Limits(
            name, nbytes, float(values[0]), float(values[growth] / 2), float(values[-1]), float(_next(values, 1) - 1)
        )
    one = np.array([1.0], {4: np.float32, 8: np.float64}[nbytes])
    info = np.finfo(one.dtype)
    gap = float(np.nextafter(one, 2 * one)[0]) - 1.0
    return Limits(name, nbytes, float(info.smallest_subnormal), float(info.smallest_normal), float(info.max), gap)


def _next(values: Any, above: float) -> float:
    return float(values[np.searchsorted(values, above, side="right")])


def rounded(values: Any, name: str) -> Any:
    """`values` as a tensor of that format holds them. Shapes: as given; float32 (float64 for fp64)."""
    return tensor(values, dtype=name).numpy()


def gradients_of(config: RunConfig) -> Any:
    """All gradients of a run's first step in fp64, flat: what SGD with a learning rate of 1 takes from the weights.

    The weights after a step at rate 1 are subtracted from those after one at a rate too small to move any.
    What is smaller than 1e-14 is rounding: the biases of attention's keys, which softmax cannot feel. It is made 0.
    """
    sgd = config.replace(precision="fp64", optimizer="sgd", steps=1, loss_scale=None)
    before, after = run(sgd.replace(lr=1e-300)).weights, run(sgd.replace(lr=1.0)).weights
    gradients = np.concatenate([(before[name] - after[name]).reshape(-1) for name in before])
    return np.where(np.abs(gradients) < _NOISE, 0.0, gradients)


@dataclass(frozen=True, slots=True)
class Fate:
    """Of all gradients times a scale, the shares that a format holds in full, with fewer digits, as 0, and as inf."""

    scale: float
    full: float
    fewer_digits: float
    zero: float
    infinite: float


def fate_of(gradients: Any, name: str, scale: float = 1.0) -> Fate:
    """What becomes of gradients that are multiplied by `scale` and stored. Exact zeros are left out."""
    stored = np.abs(rounded(gradients[gradients != 0] * scale, name).astype(np.float64))
    shares = [stored == 0, (stored > 0) & (stored < dtype_of(name).min_normal), np.isinf(stored)]
    zero, fewer, infinite = (float(share.mean()) for share in shares)
    return Fate(scale, 1.0 - zero - fewer - infinite, fewer, zero, infinite)


@dataclass(frozen=True, slots=True)
class SlopeFit:
    """A slope fitted by Adam: its fp32 value after each step, and the first step's gradient, unscaled."""

    slopes: tuple[float, ...]
    first_gradient: float


def fit_slope(
    precision: str, *, loss_scale: float = 1.0, lr: float = 0.05, steps: int = 200, masters: bool = True
) -> SlopeFit:
    """Fit y = w x to 1,024 points of y = 3 x, |x| <= 0.001, in the given format, from w = 0.

    Forward and backward run in `precision`; Adam moves a weight in fp32. Without `masters` that
    weight is rounded to `precision` after each step, which is all that is kept of it.
    """
    device = cpu()
    points = np.linspace(-1e-3, 1e-3, 1024)
    x, y = tensor(points, device, dtype=precision), tensor(3 * points, device, dtype=precision)
    master, m, v = (tensor([0.0], device) for _ in range(3))
    slopes, first = [], 0.0
    for step in range(1, steps + 1):
        w = tensor(master.numpy(), device, dtype=precision, requires_grad=True)
        error = x * w - y
        ((error * error).mean() * loss_scale).backward()
        assert w.grad is not None
        first = w.grad.item() / loss_scale if step == 1 else first
        Adam().update(
            master.buffer,
            w.grad.buffer,
            [m.buffer, v.buffer],
            grad_scale=1 / loss_scale,
            lr=lr,
            step=step,
            decays=False,
        )
        if not masters:
            master = tensor(rounded(master.numpy(), precision), device)
        slopes.append(master.item())
    return SlopeFit(tuple(slopes), first)


@dataclass(frozen=True, slots=True)
class Moved:
    """One training step: the share of fp32 masters that it moved, and of those the share whose half type moved too."""

    masters: float
    halves: float


def moved_by_step(config: RunConfig, step: int) -> Moved:
    """How many weights one step of a half-precision run moves, before and after rounding. `step` counts from 1.

    Raises: InputError for a precision without masters.
    """
    if not dtype_of(config.precision.param_dtype).is_half:
        raise InputError(f"precision {config.precision.param_dtype}: expected fp16 or bf16, which keep masters")
    before, after = (run(config.replace(steps=steps)).weights for steps in (step, step + 1))
    moved = halves = total = 0
    for name, weights in before.items():
        changed = weights != after[name]
        total += weights.size
        moved += int(changed.sum())
        halves += int(
            (rounded(weights, config.precision.param_dtype) != rounded(after[name], config.precision.param_dtype)).sum()
        )
    return Moved(moved / total, halves / moved)


def range_figure(gradients: Any, scales: Sequence[float] = (1.0,)) -> Picture:
    """The formats' ranges on one line of powers of two, below the sizes of gradients times each of the scales."""
    page = open_page((8.0, 3.2 + 0.55 * len(scales)), "light")
    frame(
        page,
        "What each format can hold, and where gradients lie",
        "Powers of two. Full colour: numbers with all their digits. Pale: subnormal, with fewer and fewer.",
        notes=["Hills: how many gradients of each size, all of one height. Left of the dashes fp16 rounds to 0."],
    )
    axes: Any = page.figure.add_subplot()
    dress(page, axes, grid="x")
    sheet = Sheet(page, axes)
    theme = page.theme
    for row, name in enumerate(reversed(FORMATS)):
        seen = limits(name)
        low, normal, high = (float(np.log2(value)) for value in (seen.smallest, seen.min_normal, seen.largest))
        color = theme.color(LINE_PAINTS[(3, 1, 5)[row]])
        axes.barh(row, high - normal, 0.6, left=normal, color=color)
        axes.barh(row, normal - low, 0.6, left=low, color=mixed(color, theme.background))
        write(sheet, ((normal + high) / 2, row), name, bold=True, color=ink_on(color))
        write(sheet, (low - 3, row), _power(seen.smallest), scale=0.85, ha="right")
    exponents = np.log2(np.abs(gradients[gradients != 0]))
    for at, scale in enumerate(scales):
        powers, color = exponents + np.log2(scale), theme.color(LINE_PAINTS[(0, 2, 4)[at % 3]])
        counts, edges = np.histogram(powers, bins=np.arange(_LOG_LOW, _LOG_HIGH, 1.0))
        floor = 2.6 + 1.15 * at
        axes.stairs(floor + counts / counts.max(), edges, baseline=floor, fill=True, color=color)
        words = "gradients" if scale == 1.0 else f"gradients times {_power(scale)}"
        write(sheet, (float(powers.max()) + 4, floor + 0.4), words, ha="left", color=color)
    axes.axvline(np.log2(limits("fp16").smallest) - 1, color=theme.muted, linewidth=1.0, dashes=(4, 2))
    axes.set_xlim(_LOG_LOW - 14, _LOG_HIGH)
    axes.set_ylim(-0.6, 2.6 + 1.15 * len(scales) + 0.1)
    axes.set_yticks([])
    ticks = [-149, -100, -50, -24, 0, 16, 50, 100, 128]
    axes.set_xticks(ticks, [f"$2^{{{power}}}$" for power in ticks])
    return picture(sheet)


def _power(value: float) -> str:
    return "2" + str(round(float(np.log2(value)))).translate(_SUPERSCRIPTS)


def ticks_figure(low: float, high: float, names: Sequence[str] = ("fp16", "bf16")) -> Picture:
    """Every number that 16-bit formats hold from `low` to `high`, one tick each.

    Raises: InputError for bounds between which a format has no two numbers.
    """
    sheet = open_sheet(
        f"Every number from {low:g} to {high:g}",
        "One tick is one number. What falls between two ticks is rounded to one of them.",
        across=(low - 0.2 * (high - low), high + 0.03 * (high - low)),
        up=(-0.6, len(names) - 0.4),
        size=(8.0, 1.5 + 0.75 * len(names)),
    )
    theme = sheet.page.theme
    for row, name in enumerate(reversed(list(names))):
        values = half_values(name)
        inside = values[(values >= low) & (values <= high)]
        if inside.size < 2:
            raise InputError(f"{name} has {inside.size} numbers from {low:g} to {high:g}: expected a wider range")
        color = theme.color(LINE_PAINTS[1 if name == "bf16" else 5])
        sheet.axes.plot([low, high], [row - 0.28] * 2, color=theme.muted, linewidth=1.0)
        sheet.axes.vlines(inside, row - 0.28, row + 0.1, color=color, linewidth=1.6)
        write(sheet, (low - 0.03 * (high - low), row - 0.05), f"{name}\n{inside.size} numbers", scale=0.9, ha="right")
        for value in (low, high):
            write(sheet, (value, row - 0.45), f"{value:g}", scale=0.85, color=theme.muted)
    return picture(sheet)
