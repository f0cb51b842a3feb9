"""Mixed precision: loss scaling, overflow, and the gradient's norm over all ranks.

Half types have 2-byte weights and gradients, and fp32 masters and moments (Micikevicius et al.,
1710.03740). The scalers follow DeepSpeed 0.19, with one repair. DeepSpeed updates the scale first
and divides the gradients by the new scale, so they halve on the step that raises it. Here they
are divided by the scale with which they were computed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.work import ADD_NORM, work_of
from zerosim.dtypes import fp64
from zerosim.errors import LossScaleExhausted
from zerosim.placement.spec import WeightSpec
from zerosim.tensor.flat import Flat, in_turn, slice_size


class LossScaler:
    """Dynamic loss scaling, or with `dynamic=False` a fixed scale; overflowing steps are skipped in both.

    An overflow halves the scale once the hysteresis is used up: `hysteresis - 1` overflows are
    forgiven, and the hysteresis is refilled only when the scale rises. The scale doubles after a clean step if k =
    (steps since the last overflow) - 1 is a positive multiple of `window`: first at the end of clean
    step window + 1, then every window.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        *,
        dynamic: bool = True,
        window: int = 1000,
        hysteresis: int = 2,
        minimum: float = 1.0,
    ) -> None:
        self.scale, self.dynamic, self.minimum = float(scale), dynamic, minimum
        self.window, self.hysteresis = window, hysteresis
        self.left, self.attempts, self.last_overflow = hysteresis, 0, -1

    def update(self, overflow: bool) -> None:
        """Update the scale after one attempted step.

        Raises: LossScaleExhausted for an overflow at the minimum.
        """
        if self.dynamic:
            if overflow:
                self._shrink()
            else:
                self._grow()
        self.attempts += 1

    def _shrink(self) -> None:
        self.last_overflow = self.attempts
        if self.left > 1:
            self.left -= 1
        elif self.scale <= self.minimum:
            raise LossScaleExhausted(
                f"step {self.attempts}: gradients overflow at the smallest loss scale, {self.minimum:g}: "
                "the training diverged; lower the learning rate, clip the gradients or use bf16"
            )
        else:
            self.scale = max(self.scale / 2, self.minimum)

    def _grow(self) -> None:
        clean = self.attempts - self.last_overflow - 1
        if clean > 0 and clean % self.window == 0:
            self.left = self.hysteresis
            self.scale *= 2


class NormRow(NamedTuple):
    """The place of a flat buffer's sum of squares: in `row`, of the weights that this rank counts (None: all), slice by
    slice over its `ranks` (0: all of them). Several buffers may share a row."""

    row: int
    counts: Callable[[WeightSpec], bool] | None = None
    ranks: int = 0


def norm_partials(
    device: Device,
    flats: Sequence[Flat],
    world_size: int,
    rows: Sequence[NormRow | None] | None = None,
    num_rows: int | None = None,
    *,
    read: Callable[[Flat], Buffer | None] = attrgetter("grad_shard"),
) -> Buffer:
    """Return this rank's share of the sum of squares: (rows, N) in fp64, 0 where another rank counts.

    At every ZeRO stage each flat is cut into the same N slices, each slice is one sum,
    and padding is left out. So all ZeRO stages add the same numbers in the same order. There is a row for each unit of
    the whole model and each tensor-parallel rank, `num_rows` in total. The first of several copies counts
    (None: another rank counts this flat). Without `rows`, the flats are these alone. `read` returns a flat's local
    shard in readable memory.
    """
    rows = rows or [NormRow(i) for i in range(len(flats))]
    buffers = Counter(place.row for place in rows if place is not None)
    partials = device.alloc((num_rows or len(flats), world_size), fp64, Kind.TEMP)
    device.kernel(0, device.backend.fill, partials.array, 0.0)
    for flat, place in zip(in_turn(flats), rows, strict=True):
        if place is not None:  # a separate call: one gradient from NVMe is on the host at a time
            alone = place.counts is None and buffers[place.row] == 1
            _add_squares(
                device, flat, read(flat), place, partials.array[place.row], place.ranks or world_size, alone=alone
            )
    return partials


def _add_squares(
    device: Device, flat: Flat, grad: Buffer | None, place: NormRow, row: Array, ranks: int, *, alone: bool
) -> None:
    """Add the squares of a gradient's local shard to its row of sums, one for each of `ranks` slices. `alone`: all
    weights of the buffer count here, and no other buffer does."""
    start, stop = flat.own.start, min(flat.own.stop, flat.numel)
    if start >= stop or grad is None:
        return  # only padding, or another rank's
    size = slice_size(flat.numel, ranks)
    if alone:
        part = grad[: stop - start]
        first = start // size
        out = row[first : first + -(-part.numel // size)]
        device.kernel(2 * part.numel, device.backend.sum_squares, part.array, size, out)
        return
    one = device.alloc((1,), fp64, Kind.TEMP)
    work = work_of("add", 1, (one.array,) * 3)._replace(name=ADD_NORM)
    for begin, end in _counted(flat, place.counts):
        for at in range(begin // size, -(-end // size)):
            part = grad[max(begin, at * size) - start : min(end, at * size + size) - start]
            device.kernel(2 * part.numel, device.backend.sum_squares, part.array, part.numel, one.array)
            total = row[at : at + 1]
            device.kernels((work,), device.backend.add, total, one.array, total)


def _counted(flat: Flat, counts: Callable[[WeightSpec], bool] | None) -> list[tuple[int, int]]:
    """Yield the local slice's weights that this rank counts, as [start, end) of the flat."""
    own = flat.held.own
    return [
        (own.start + mine.at, own.start + mine.at + mine.numel)
        for mine in flat.spec.within(own)
        if counts is None or counts(mine.weight)
    ]


def total_norm(device: Device, partials: Buffer) -> float:
    """Return the norm, with squares added in (flat, slice) order. This reads the device once."""
    total = float(device.backend.to_host(partials.array).reshape(-1).cumsum()[-1])  # one after the other
    return math.sqrt(total) if total >= 0 else math.nan
