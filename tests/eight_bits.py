"""Matrices in 8 bits, for tests: codes and scales of values, and values of codes."""

from __future__ import annotations

from typing import Any

import numpy as np

from zerosim.dtypes import uint8
from zerosim.tensor import float8
from zerosim.tensor.float8 import Casting


def quantized(casting: Casting, values: Any) -> tuple[Any, Any]:
    found = [
        np.empty(shape, np.uint8 if kind is uint8 else np.float32) for shape, kind in casting.arrays(*values.shape)
    ]
    float8.quantize(np, casting, values, *found)
    return found[0], found[1]


def decoded(casting: Casting, codes: Any, scales: Any) -> Any:
    out = np.empty(codes.shape, np.float32)
    float8.decode(np, casting, codes, scales, out)
    return out
