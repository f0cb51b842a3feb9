"""Frozen weights stored as codes (QLoRA, arXiv 2305.14314): encoded once, and decoded one map at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from zerosim.device.device import Buffer, Kind
from zerosim.placement.spec import WeightSpec

if TYPE_CHECKING:
    from zerosim.tensor.flat import Flat


def quantized(flat: Flat, values: Any) -> Any:
    """Encode a weight in NF4: a host array of bytes, from its values as its own dtype rounds them."""
    from zerosim.backends.numpy.nf4 import encode_nf4  # codes are made on the host, once

    backend = flat.device.backend
    rounded = backend.empty(values.shape, flat.value_dtype)
    backend.from_host(values, rounded)
    return encode_nf4(backend.to_host(rounded))


def dequantized(flat: Flat, stored: Buffer, index: int) -> Buffer:
    """Return a weight's values in a new buffer, which lives as long as the product that reads it."""
    weight, offset = flat.spec.weights[index], flat.spec.offsets[index]
    out = flat.device.alloc(weight.shape, flat.value_dtype, Kind.TEMP)
    codes = stored[offset : offset + weight.numel]
    flat.device.kernel(2 * out.numel, flat.device.backend.dequantize_nf4, codes.array, out.array)
    return out


def values_of(weight: WeightSpec, codes: Any) -> Any:
    """Return a weight's values, fp32, from its bytes on the host."""
    from zerosim.backends.numpy.nf4 import decode_nf4

    return decode_nf4(codes.astype("uint8"), math.prod(weight.shape))
