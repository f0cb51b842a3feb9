"""Weights in GPTQ's format: 4-bit codes in groups of 128, each with a 4-bit zero and an fp16 scale, as bytes that
`placement/formats.py` describes.

A value is (code - zero) * scale. The codes here are the nearest ones. GPTQ (arXiv 2210.17323) searches for better codes
with examples of the inputs, which changes no bytes. The group of each input (g_idx) is stored, and not read here.

Source: AutoGPTQ 0.7.1, nn_modules/qlinear/qlinear_tritonv2.py (qweight, qzeros, scales, g_idx).
"""

from __future__ import annotations

import numpy as np

from zerosim.backends.kernels import Array
from zerosim.backends.numpy.cast import FLOAT16, FLOAT32
from zerosim.placement.formats import GPTQ, Format

GROUP = GPTQ.block
_LARGEST, _SMALLEST = np.float32(15), np.float32(2**-24)


def encode_gptq(values: Array) -> Array:
    """Encode a weight's finite values (..., inputs) as bytes (uint8)."""
    form, flat = GPTQ._replace(inputs=values.shape[-1]), np.asarray(values, FLOAT32).reshape(-1)
    starts = np.arange(0, flat.size, GROUP)
    low = np.minimum(np.minimum.reduceat(flat, starts), 0)
    scales = (np.maximum(np.maximum.reduceat(flat, starts), 0) - low) / _LARGEST
    scales = np.maximum(scales, _SMALLEST).astype(FLOAT16)
    wide = scales.astype(FLOAT32)
    zeros = np.clip(np.rint(-low / wide), 0, _LARGEST)
    codes = np.clip(np.rint(flat / _each(wide, flat.size)) + _each(zeros, flat.size), 0, _LARGEST)
    groups = np.arange(values.shape[-1], dtype=np.int32) // GROUP
    stored = np.zeros(form.nbytes(flat.size), np.uint8)
    arrays = _packed(codes), _packed(zeros), scales, groups
    for place, array in zip(form.places(flat.size), arrays, strict=True):
        stored[place] = array.view(np.uint8)
    return stored


def decode_gptq(stored: Array, numel: int) -> Array:
    """Decode these bytes into values (n), fp32."""
    codes, zeros, scales = (stored[place] for place in form_of(stored.size, numel).places(numel)[:3])
    wide = _each(scales.copy().view(FLOAT16).astype(FLOAT32), numel)
    return (_unpacked(codes, numel) - _each(_unpacked(zeros, GPTQ.blocks(numel)), numel)) * wide


def dequantize_gptq(stored: Array, out: Array, scales: Array | None = None) -> None:
    stored = stored if scales is None else np.concatenate([scales, stored])
    out.reshape(-1)[...] = decode_gptq(stored, out.size).astype(out.dtype)


def form_of(nbytes: int, numel: int) -> Format:
    """Return the format of a weight of so many bytes, with as many inputs as they have room for."""
    return GPTQ._replace(inputs=(nbytes - GPTQ.nbytes(numel)) // 4)


def _each(groups: Array, numel: int) -> Array:
    return np.repeat(groups, GROUP)[:numel]


def _packed(codes: Array) -> Array:
    even = np.zeros(codes.size + codes.size % 2, np.uint8)
    even[: codes.size] = codes
    return even[::2] | even[1::2] << 4


def _unpacked(packed: Array, numel: int) -> Array:
    codes = np.empty(2 * packed.size, FLOAT32)
    codes[::2], codes[1::2] = packed & 15, packed >> 4
    return codes[:numel]
