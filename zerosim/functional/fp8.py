"""Operands in 8 bits: codes and scales of a matrix, and the product of two of them.

Products add in fp32 and are rounded once. A scale that all columns of an operand's row share multiplies the sum,
others each of its terms. A bias is added in fp32 before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.work import MATMUL, KernelWork
from zerosim.dtypes import DType, fp32
from zerosim.functional.fp8_recipes import History
from zerosim.tensor import float8
from zerosim.tensor.coded_flat import run_rule
from zerosim.tensor.float8 import Casting
from zerosim.tensor.float8_codes import values_of


class Coded(NamedTuple):
    """An operand in codes, (rows, inner), and scales. `turned`: both buffers hold its transpose."""

    casting: Casting
    codes: Buffer
    scales: Buffer
    turned: bool = False

    @property
    def arrays(self) -> tuple[Array, Array]:
        codes, scales = self.codes.array, self.scales.array
        return (codes.T, scales.T) if self.turned else (codes, scales)


class Wanted(NamedTuple):
    """What to make of a matrix: codes of itself, or of its transpose (`across`), stored `turned` or not, as bytes of a
    `kind`, or into the buffers of `into`."""

    casting: Casting
    across: bool = False
    turned: bool = False
    kind: Kind = Kind.TEMP
    into: Coded | None = None


@dataclass(slots=True)
class Seen:
    """One operand's delayed scaling: the amax of former steps, and the factor that they gave."""

    history: Buffer
    factor: Buffer
    step: int | None = None

    @staticmethod
    def new(device: Device, length: int) -> Seen:
        """Allocate an empty history, whose factor is 1."""
        history, factor = (
            device.alloc(shape, fp32, Kind.PARAM, name=name)
            for shape, name in (((length, 1), "amax history"), ((1,), "factor"))
        )
        device.kernel(0, device.backend.fill, history.array, 0.0)
        device.kernel(0, device.backend.fill, factor.array, 1.0)
        return Seen(history, factor)

    def roll(self, device: Device, casting: Casting, how: History, share: Callable[[Buffer], None] | None) -> None:
        """Take the factor from the steps before, in the first use of a step, of all ranks with which to `share` it."""
        if device.where.step == self.step or not device.is_training:
            return
        self.step = device.where.step
        if share is not None:
            share(self.history)

        def rule(xp: Any, history: Array, factor: Array) -> None:
            factor[...] = float8.delayed_factor(xp, casting, history, how.algo, factor)
            history[...] = float8.rolled(xp, history)

        run_rule(device, "fp8_scale", 0, rule, [self.history.array], [self.factor.array])


def cast(
    device: Device,
    values: Array,
    wanted: Sequence[Wanted],
    seen: Seen | None = None,
    share: Callable[[Buffer], None] | None = None,
) -> list[Coded]:
    """Make codes of a matrix (rows, columns). One scale for all of it needs its amax first, which `share` makes that of
    all ranks that hold a part of it; other scales come with the codes.

    Raises: InputError if blocks do not divide it.
    """
    rows, columns = values.shape
    made = [one.into or empty(partial(device.alloc, kind=one.kind), one, rows, columns) for one in wanted]
    amax = None
    if seen is None and any(one.casting.block == (0, 0) for one in wanted):
        amax = device.alloc((1, 1), fp32, Kind.TEMP)
        first = wanted[0].casting

        def find(xp: Any, values: Array, amax: Array) -> None:
            amax[...] = float8.amax_of(xp, first._replace(block=(0, 0)), values)

        run_rule(device, "fp8_amax", rows * columns, find, [values], [amax.array])
        if share is not None:
            share(amax)

    def rule(xp: Any, values: Array, *out: Array) -> None:
        for one, codes, scales in zip(wanted, out[::2], out[1::2], strict=True):
            matrix, casting = values.T if one.across else values, one.casting
            if seen is not None:
                if device.is_training:
                    found = float8.amax_of(xp, casting, matrix)
                    seen.history.array[0] = xp.maximum(seen.history.array[0], found[0])
                scales[...] = xp.float32(1) / seen.factor.array
                float8.encode(xp, casting, matrix, scales, codes, seen.factor.array.reshape(1, 1))
            elif amax is not None and casting.block == (0, 0):
                float8.scales_from(xp, casting, amax.array, scales)
                factors = float8.factors_from(xp, casting, amax.array)
                float8.encode(xp, casting, matrix, scales, codes, factors)
            else:
                float8.quantize(xp, casting, matrix, codes, scales)

    run_rule(device, "fp8_cast", rows * columns, rule, [values], [array for one in made for array in one.arrays])
    return made


def empty(alloc: Callable[[tuple[int, ...], DType], Buffer], one: Wanted, rows: int, columns: int) -> Coded:
    """Allocate codes and scales of a matrix (rows, columns)."""
    shapes = one.casting.arrays(*((columns, rows) if one.across else (rows, columns)))
    codes, scales = (alloc((shape[1], shape[0]) if one.turned else shape, dtype) for shape, dtype in shapes)
    return Coded(one.casting, codes, scales, one.turned)


def multiply(device: Device, name: str, left: Coded, right: Coded, out: Array, bias: Array | None = None) -> None:
    """Set out (M, N) to left (M, K) @ right (N, K).T + bias."""
    k = device.backend
    arrays = [*left.arrays, *right.arrays]
    (rows, inner), columns = arrays[0].shape, arrays[2].shape[0]

    def rule(xp: Any, a: Array, of_a: Array, b: Array, of_b: Array, out: Array, *bias: Array) -> None:
        sums, wide = xp.empty(out.shape, xp.float32), [xp.empty(codes.shape, xp.float32) for codes in (a, b)]
        after = left.casting.block[1] == right.casting.block[1] == 0
        for one, codes, scales, values in zip((left, right), (a, b), (of_a, of_b), wide, strict=True):
            if after:
                values[...] = values_of(xp, one.casting.kind, codes)
            else:
                float8.decode(xp, one.casting, codes, scales, values)
        k.matmul(wide[0], wide[1].T, sums)
        if after:
            sums *= of_a * of_b.T
        if bias:
            added = xp.empty(bias[0].shape, xp.float32)
            k.copy(bias[0], added)
            sums += added
        k.copy(sums, out)

    biases = [] if bias is None else [bias]
    read = sum(int(array.nbytes) for array in (*arrays, *biases))
    work = KernelWork(name, MATMUL, 2 * rows * inner * columns, read, int(out.nbytes), (rows, inner, columns))
    device.kernels((work,), k.coded, rule, *arrays, out, *biases)
