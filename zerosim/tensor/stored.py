"""Frozen weights stored as codes (QLoRA, arXiv 2305.14314): encoded once, and decoded one map at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from zerosim.backends.kernels import Array, Backend
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import DType
from zerosim.placement.formats import Format
from zerosim.placement.spec import FlatSpec, WeightSpec


class Codes(NamedTuple):
    """What makes a weight's bytes of its values (..., inputs), and fp32 values (n) of its bytes, on the host; and what
    launches the kernel that fills a buffer of a device with them."""

    encode: Callable[[Array], Array]
    decode: Callable[[Array, int], Array]
    launch: Callable[[Device, Buffer, Buffer], None]


@cache
def _codes_of(name: str) -> Codes:
    from zerosim.backends.numpy import gptq, nf4  # codes are made on the host, once

    return {
        "nf4": Codes(nf4.encode_nf4, nf4.decode_nf4, _launch_nf4),
        "gptq": Codes(gptq.encode_gptq, gptq.decode_gptq, _launch_gptq),
    }[name]


def _launch_nf4(device: Device, codes: Buffer, out: Buffer) -> None:
    device.kernel(2 * out.numel, device.backend.dequantize_nf4, codes.array, out.array)


def _launch_gptq(device: Device, codes: Buffer, out: Buffer) -> None:
    device.kernel(2 * out.numel, device.backend.dequantize_gptq, codes.array, out.array)


def encoded(backend: Backend, dtype: DType, stored: Format, values: Any) -> Any:
    """Return a weight's bytes, a host array, from its values as `dtype` rounds them."""
    rounded = backend.empty(values.shape, dtype)
    backend.from_host(values, rounded)
    return _codes_of(stored.name).encode(backend.to_host(rounded))


def decoded(param: Buffer, spec: FlatSpec, index: int, dtype: DType) -> Buffer:
    """Return a weight's values in a new buffer, which lives as long as the product that reads it."""
    weight, offset = spec.weights[index], spec.offsets[index]
    assert weight.format is not None, f"{weight.name} is not stored as codes"
    out = param.device.alloc(weight.shape, dtype, Kind.TEMP)
    _codes_of(weight.format.name).launch(param.device, param[offset : offset + weight.numel], out)
    return out


def values_of(weight: WeightSpec, codes: Any) -> Any:
    """Return a weight's values, fp32, from its bytes on the host."""
    assert weight.format is not None, f"{weight.name} is not stored as codes"
    return _codes_of(weight.format.name).decode(codes.astype("uint8"), math.prod(weight.shape))
