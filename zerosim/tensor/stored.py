"""Frozen weights stored as codes (QLoRA, arXiv 2305.14314): encoded once, and decoded one map at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from zerosim.backends.kernels import Array, Backend
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType
from zerosim.placement.formats import Format
from zerosim.placement.spec import FlatSpec, WeightSpec


class Codes(NamedTuple):
    """What makes a weight's bytes of its values (..., inputs), and fp32 values (n) of its bytes, on the host; and a
    backend's kernel that makes values of bytes."""

    encode: Callable[[Array], Array]
    decode: Callable[[Array, int], Array]
    kernel: Callable[[Backend], Callable[..., None]]


@cache
def _codes_of(name: str) -> Codes:
    from zerosim.backends.numpy import gptq, nf4  # codes are made on the host, once

    return {
        "nf4": Codes(nf4.encode_nf4, nf4.decode_nf4, lambda backend: backend.dequantize_nf4),
        "gptq": Codes(gptq.encode_gptq, gptq.decode_gptq, lambda backend: backend.dequantize_gptq),
    }[name]


def encoded(backend: Backend, dtype: DType, stored: Format, values: Any) -> Any:
    """Return a weight's bytes, a host array, from its values as `dtype` rounds them."""
    rounded = backend.empty(values.shape, dtype)
    backend.from_host(values, rounded)
    return _codes_of(stored.name).encode(backend.to_host(rounded))


def beside(spec: FlatSpec, index: int) -> slice:
    """Return where a weight's scales are in a buffer's, which are apart from its codes."""
    sizes = [one.format.beside(math.prod(one.shape)) for one in spec.weights[: index + 1] if one.format is not None]
    return slice(sum(sizes[:-1]), sum(sizes))


def decoded(param: Buffer, spec: FlatSpec, index: int, dtype: DType, scales: Buffer | None = None) -> Buffer:
    """Return a weight's values in a new buffer, which lives as long as the product that reads it. `scales`: the
    buffer's, if they are apart."""
    weight, offset = spec.weights[index], spec.offsets[index]
    assert weight.format is not None, f"{weight.name} is not stored as codes"
    out = param.device.alloc(weight.shape, dtype, Kind.TEMP)
    own = None if scales is None else scales[beside(spec, index)]
    device, codes = param.device, param[offset : offset + weight.numel]
    apart = () if own is None else (own.array,)
    device.kernel(2 * out.numel, _codes_of(weight.format.name).kernel(device.backend), codes.array, out.array, *apart)
    return out


def values_of(weight: WeightSpec, codes: Any) -> Any:
    """Return a weight's values, fp32, from its bytes on the host."""
    assert weight.format is not None, f"{weight.name} is not stored as codes"
    return _codes_of(weight.format.name).decode(codes.astype("uint8"), math.prod(weight.shape))
