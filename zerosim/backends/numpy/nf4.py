"""Weights in 4-bit NormalFloat with doubly quantized scales (QLoRA), as bytes that `placement/formats.py` describes.

A block of 64 is divided by its largest magnitude (absmax), and each quotient becomes the nearest of 16 numbers, the
quantiles of a normal distribution. The absmax values, less their mean, become 8-bit codes in blocks of 256 themselves.

Sources: arXiv 2305.14314, section 3 and appendix E (the table); bitsandbytes 0.50.2, whose codes on a CPU these are.
"""

from __future__ import annotations

import numpy as np

from zerosim.backends.kernels import QUANT_BLOCK, Array
from zerosim.backends.numpy.cast import FLOAT32
from zerosim.backends.numpy.quantize import dequantize, dynamic_map, nearest
from zerosim.placement import formats

NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    FLOAT32,
)
NF4.flags.writeable = False
BLOCK = formats.NF4.block
_STEPS = 65535
_BOUNDS = (NF4[:-1] + NF4[1:]) / np.float32(2)


def encode_nf4(values: Array, mean: float | None = None) -> Array:
    """Encode a weight's finite values (n), n >= 1, as bytes (uint8). `mean` is subtracted from the absmax values
    (default: their own mean)."""
    values = np.asarray(values, FLOAT32).reshape(-1)
    numel = values.size
    absmax = np.maximum.reduceat(np.abs(values), np.arange(0, numel, BLOCK))
    whole, tiny = numel - numel % BLOCK, np.float32(1e-38)
    safe = np.maximum(absmax, tiny)
    scaled = np.empty(numel + numel % 2, FLOAT32)
    scaled[-1] = 0.0  # an odd last element's neighbour
    scaled[:whole] = values[:whole] * np.repeat(np.float32(1) / safe, BLOCK)[:whole]
    scaled[whole:numel] = values[whole:] / safe[-1]
    codes = np.searchsorted(_BOUNDS, np.clip(scaled, -1, 1)).astype(np.uint8)
    offset = np.float32(absmax.mean(dtype=np.float64) if mean is None else mean)
    absmax_codes, scales = _coarsely(absmax - offset)
    stored = np.zeros(formats.NF4.nbytes(numel), np.uint8)
    arrays = codes[::2] << 4 | codes[1::2], absmax_codes, np.array([offset], FLOAT32), scales
    for place, array in zip(formats.NF4.places(numel), arrays, strict=True):
        stored[place] = array.view(np.uint8)
    return stored


def _coarsely(values: Array) -> tuple[Array, Array]:
    """8-bit codes and scales as bitsandbytes makes them on a CPU: a quotient is rounded to one of 65,536 steps from -1
    to 1, and has the code of the entry nearest to that step. A block of zeros has code 0."""
    starts, one, half = np.arange(0, values.size, QUANT_BLOCK), np.float32(1), np.float32(0.5)
    scales = np.maximum.reduceat(np.abs(values), starts)
    each = np.repeat(scales, QUANT_BLOCK)[: values.size]
    quotients = values / np.where(each == 0, one, each)
    steps = np.floor((quotients + one) * half * np.float32(_STEPS) + half)
    codes = nearest(steps / np.float32(_STEPS) * np.float32(2) - one, dynamic_map(True))
    return np.where(each == 0, np.uint8(0), codes), scales


def decode_nf4(stored: Array, numel: int) -> Array:
    """Decode these bytes into values (n), fp32."""
    packed, absmax_codes, *numbers = (stored[place] for place in formats.NF4.places(numel))
    mean, scales = (number.copy().view(FLOAT32) for number in numbers)
    absmax = dequantize(absmax_codes, scales, dynamic_map(True)) + mean
    codes = np.empty(2 * packed.size, np.uint8)
    codes[::2], codes[1::2] = packed >> 4, packed & 15
    return NF4[codes[:numel]] * np.repeat(absmax, BLOCK)[:numel]


def dequantize_nf4(stored: Array, out: Array, scales: Array | None = None) -> None:
    stored = stored if scales is None else np.concatenate([scales, stored])
    out.reshape(-1)[...] = decode_nf4(stored, out.size).astype(out.dtype)
