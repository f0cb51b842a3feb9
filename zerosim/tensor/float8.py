"""Matrices in 8 bits: a code for each number, and a scale for each quantization block.

    scaling     block     scale  rule
    tensorwise  (0, 0)    fp32   torchao: largest / amax, in fp64
    rowwise     (1, 0)    fp32   the same, rounded to a power of two
    delayed     (0, 0)    fp32   te: the amax of steps before
    blockwise   (1, 128)  fp32   deepseek: amax / largest; torchao; te. Weights: (128, 128)
    mxfp8       (1, 32)   e8m0   a power of two, by `rounding`

A number x becomes the code of x * factor. Its scale, 1 / factor, multiplies the code's value later. Every rule takes
`xp`, NumPy's or CuPy's functions. Sources: torchao 0.18.0 (float8, prototype/mx_formats,
prototype/blockwise_fp8_training), Transformer Engine 2 (common/recipe, common/util/ptx.cuh), DeepSeek-V3
(inference/kernel.py). docs/eight_bits.md lists where they differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from zerosim.backends.kernels import Array
from zerosim.dtypes import DType, fp32, uint8
from zerosim.errors import InputError
from zerosim.tensor import float8_codes as bits
from zerosim.tensor.float8_codes import E4M3 as E4M3
from zerosim.tensor.float8_codes import E5M2 as E5M2
from zerosim.tensor.float8_codes import KINDS as KINDS
from zerosim.tensor.float8_codes import Kind as Kind

if TYPE_CHECKING:
    from zerosim.backends.numpy.narrow import Fates

SMALLEST_AMAX = {"torchao": 1e-12, "deepseek": 1e-4}
"""What amax is raised to before it divides, by rule. Transformer Engine's epsilon is 0."""
LARGEST32 = 3.4028234663852886e38


class Casting(NamedTuple):
    """How the numbers of one operand become codes: a matrix whose last dimension the product sums over.

    block         rows and columns that share a scale; 0: all of them
    scale         fp32, or e8m0: a byte, a power of two
    rounding      of an e8m0 scale: floor, ceil, rceil or even (torchao's ScaleCalculationMode)
    power_of_two  fp32 factors are rounded down to one (round_scales_to_power_of_2, force_pow_2_scales)
    saturate      too large numbers become the largest; else nan (e4m3) or infinity (e5m2)
    margin        of delayed scaling: powers of two left free above amax
    rule          the library whose arithmetic makes the scales: torchao, te or deepseek
    """

    kind: Kind
    block: tuple[int, int]
    scale: str = "fp32"
    rounding: str = "floor"
    power_of_two: bool = False
    saturate: bool = True
    margin: int = 0
    rule: str = "torchao"

    @property
    def has_factors(self) -> bool:
        """Whether values are multiplied by `factors_from`, and not divided by their scales."""
        return self.scale == "fp32" and self.rule != "deepseek"

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the scales. Blocks at the end may be smaller, but not those with e8m0 scales.

        Raises: InputError if such blocks do not divide the matrix.
        """
        high, wide = self.block
        if self.scale == "e8m0" and ((high and rows % high) or (wide and columns % wide)):
            raise InputError(
                f"a ({rows}, {columns}) matrix has no whole number of {high} x {wide} blocks, which e8m0 scales need: "
                f"make its last dimension a multiple of {wide}"
            )
        return -(-rows // high) if high else 1, -(-columns // wide) if wide else 1

    def arrays(self, rows: int, columns: int) -> list[tuple[tuple[int, int], DType]]:
        """Return the shape and the dtype of the codes, then of the scales."""
        return [((rows, columns), uint8), (self.grid(rows, columns), uint8 if self.scale == "e8m0" else fp32)]


def amax_of(xp: Any, casting: Casting, values: Array) -> Array:
    """Return the largest magnitude of each block in fp32. nan wins, but Transformer Engine's maximum skips it."""
    sizes = xp.abs(values.astype(xp.float32))
    if casting.rule == "te":
        sizes = xp.where(xp.isnan(sizes), xp.float32(0), sizes)
    (rows, columns), (down, across) = sizes.shape, casting.grid(*sizes.shape)
    if not sizes.size:
        return xp.zeros((down, across), xp.float32)
    high, wide = casting.block[0] or rows, casting.block[1] or columns
    if (down * high, across * wide) != (rows, columns):
        padded = xp.zeros((down * high, across * wide), xp.float32)
        padded[:rows, :columns] = sizes
        sizes = padded
    return sizes.reshape(down, high, across, wide).max(axis=(1, 3))


@np.errstate(all="ignore")
def factors_from(xp: Any, casting: Casting, amax: Array) -> Array:
    """Return the fp32 numbers that values are multiplied by before they become codes: largest / amax."""
    largest = casting.kind.largest
    if casting.rule == "te":
        factors = xp.minimum(xp.float32(largest) / amax, xp.float32(LARGEST32))
        factors = xp.where(xp.isfinite(amax) & (amax > 0), factors, xp.float32(1))
        return bits.cut_to_power(xp, factors) if casting.power_of_two else factors
    raised = xp.maximum(amax.astype(xp.float64), SMALLEST_AMAX[casting.rule])
    factors = (largest / raised).astype(xp.float32)
    return _power(xp, xp.floor(bits.log2_of(xp, factors))) if casting.power_of_two else factors


@np.errstate(all="ignore")
def scales_from(xp: Any, casting: Casting, amax: Array, out: Array) -> None:
    """Set `out` to the scales that multiply the codes' values: fp32, or e8m0 bytes."""
    kind = casting.kind
    if casting.scale == "e8m0" and casting.rounding != "rceil":
        out[...] = bits.bytes_of(xp, kind, amax, casting.rounding)
    elif casting.scale == "e8m0" and casting.rule == "te":
        out[...] = bits.bytes_above(xp, amax * xp.float32(1 / kind.largest), exact=True)
    elif casting.scale == "e8m0":
        out[...] = bits.bytes_above(xp, amax / xp.float32(kind.largest), exact=False)
    elif casting.rule == "deepseek":
        found = xp.maximum(amax, xp.float32(SMALLEST_AMAX["deepseek"])) / xp.float32(kind.largest)
        out[...] = _power(xp, xp.ceil(bits.log2_of(xp, found))) if casting.power_of_two else found
    else:
        out[...] = xp.float32(1) / factors_from(xp, casting, amax)


def encode(xp: Any, casting: Casting, values: Array, scales: Array, codes: Array, factors: Array | None = None) -> None:
    """Set `codes` (rows, columns) to the codes of values in fp32, bf16 or fp16, as views of any strides.

    factors: those of `factors_from`, with which the codes are the library's bit for bit. Without them 1 / scales is
    taken, which can differ from a factor in its last place.
    """
    codes[...] = bits.codes_of(xp, casting.kind, _scaled(xp, casting, values, scales, factors), casting.saturate)


@np.errstate(all="ignore")
def decode(xp: Any, casting: Casting, codes: Array, scales: Array, out: Array) -> None:
    """Set `out` (rows, columns), fp32, to the values of codes times their scales."""
    powers = bits.powers_of(xp, scales) if casting.scale == "e8m0" else scales
    out[...] = bits.values_of(xp, casting.kind, codes) * _spread(xp, casting, powers, codes.shape)


def quantize(xp: Any, casting: Casting, values: Array, codes: Array, scales: Array) -> None:
    """Set codes and scales from the values alone: amax, scales, codes."""
    amax = amax_of(xp, casting, values)
    scales_from(xp, casting, amax, scales)
    encode(xp, casting, values, scales, codes, factors_from(xp, casting, amax) if casting.has_factors else None)


def fates(casting: Casting, values: Array, scales: Array | None = None) -> Fates:
    """Count the values on the host that keep all digits, keep fewer, become 0, and saturate or are not finite.

    A 0 keeps all its digits. scales: those of an earlier amax; without them, the values' own.
    """
    from zerosim.backends.numpy.narrow import Fates  # not on the way to a plan: it brings NumPy's backend

    factors = None
    if scales is None:
        amax = amax_of(np, casting, values)
        shape, dtype = casting.arrays(*values.shape)[1]
        scales = np.empty(shape, np.uint8 if dtype is uint8 else np.float32)
        scales_from(np, casting, amax, scales)
        factors = factors_from(np, casting, amax) if casting.has_factors else None
    scaled = _scaled(np, casting, values, scales, factors)
    sizes = bits.codes_of(np, casting.kind, scaled, saturate=False) & 0x7F
    overflowed = int(np.count_nonzero(sizes > casting.kind.top))
    to_zero = int(np.count_nonzero((sizes == 0) & (values.astype(np.float32) != 0)))
    fewer = int(np.count_nonzero((sizes > 0) & (sizes < 1 << casting.kind.digits)))
    return Fates(sizes.size - overflowed - to_zero - fewer, fewer, to_zero, overflowed)


@np.errstate(all="ignore")
def delayed_factor(xp: Any, casting: Casting, history: Array, algo: str = "max", former: Array | None = None) -> Array:
    """Return the factor that an amax history gives (Transformer Engine's `scale`): largest / 2^margin / amax.

    history: fp32 (length, ...); history[0] is the step just done. algo: `max` of all, or `most_recent`, history[0].
    former: the factor before, which stays where amax is not finite or history[0] is 0. Without it: 1.
    """
    amax = recent = history[0]
    if algo == "max":
        amax = xp.where(xp.isnan(history), xp.float32(0), history).max(axis=0)
    factors = xp.minimum(xp.float32(casting.kind.largest * 2.0**-casting.margin) / amax, xp.float32(LARGEST32))
    is_new = xp.isfinite(amax) & (amax > 0) & (recent != 0)
    return xp.where(is_new, factors, xp.float32(1) if former is None else former)


@np.errstate(all="ignore")
def delayed_scale(xp: Any, casting: Casting, history: Array, algo: str = "max", former: Array | None = None) -> Array:
    """Return the scale that an amax history gives, 1 / `delayed_factor`. former: the scale before."""
    before = None if former is None else xp.float32(1) / former
    return xp.float32(1) / delayed_factor(xp, casting, history, algo, before)


def rolled(xp: Any, history: Array) -> Array:
    """Return the amax history for the next step: history[0] moves to the end, the oldest is dropped, [0] is 0.

    A history whose [0] is 0 stays: the operand was not used in this step.
    """
    moved = xp.roll(history, -1, axis=0)
    moved[0] = 0
    return xp.where(history[0] == 0, history, moved)


@np.errstate(all="ignore")
def _scaled(xp: Any, casting: Casting, values: Array, scales: Array, factors: Array | None) -> Array:
    """Return fp32 values over their scales, in the arithmetic of the library."""
    wide = xp.ascontiguousarray(values.astype(xp.float32))
    if factors is None and casting.has_factors:
        factors = xp.float32(1) / scales
    elif casting.scale == "e8m0" and casting.rounding == "rceil":
        powers = xp.float32(1) / bits.powers_of(xp, scales)
        factors = xp.where(scales == 0, xp.float32(1), powers)  # both libraries leave such blocks as they are
    if factors is not None:
        return wide * _spread(xp, casting, factors, values.shape)
    if casting.scale == "e8m0":  # torchao divides by at least 2^-126, and a block with nan by infinity
        powers = xp.maximum(bits.powers_of(xp, scales), xp.float32(2.0**-126))
        scales = xp.where(scales == 255, xp.float32(xp.inf), powers)
    return wide / _spread(xp, casting, scales, values.shape)


def _spread(xp: Any, casting: Casting, scales: Array, shape: tuple[int, ...]) -> Array:
    """Return one scale for each element, or arrays that broadcast to that."""
    for axis in (0, 1):
        if scales.shape[axis] not in (1, shape[axis]):
            scales = xp.repeat(scales, casting.block[axis], axis=axis)
            scales = scales[: shape[0]] if axis == 0 else scales[:, : shape[1]]
    return scales


def _power(xp: Any, exponents: Array) -> Array:
    return xp.exp2(exponents.astype(xp.float64)).astype(xp.float32)
