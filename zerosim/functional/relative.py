"""T5's bias of scores: a number for each head and each bucket of distances between a query and a key (1910.10683).

Half of the buckets hold one distance each, the others wider and wider ranges, up to the largest distance. T tokens,
H heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import int64
from zerosim.functional.common import Grads, weight_grad
from zerosim.functional.embedding import embedding_result
from zerosim.tensor.tensor import Operand, Tensor, apply, layer_of


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """Saves the buckets (T, T)."""

    buckets: Buffer
    weight: Operand

    def backward(self, grad: Buffer) -> Grads:
        def make() -> Buffer:
            device, heads = grad.device, grad.shape[0]
            rows = device.alloc((*self.buckets.shape, heads), grad.dtype, Kind.TEMP)
            device.kernel(0, device.backend.copy, grad.array.transpose(1, 2, 0), rows.array)
            dweight = self.weight.new_grad()
            arrays = rows.array, self.buckets.array, dweight.array
            device.kernel(grad.numel, device.backend.embedding_backward, *arrays)
            return dweight

        return (weight_grad(self.weight, make),)


def relative_bias(weight: Operand, tokens: int, *, largest: int, causal: bool) -> Tensor:
    """Return the bias (H, T, T) of the scores of T queries and as many keys. Shapes: weight (buckets, H)."""
    device = weight.device
    buckets = device.alloc((tokens, tokens), int64, Kind.ACTIVATION)
    device.backend.from_host(buckets_of(tokens, weight.shape[0], largest, causal=causal), buckets.array)
    rows = embedding_result(buckets, weight)
    out = device.alloc((weight.shape[1], tokens, tokens), weight.dtype, Kind.ACTIVATION)
    device.kernel(0, device.backend.copy, rows.array.transpose(2, 0, 1), out.array)
    saved = {"buckets": buckets, "weight": weight}
    return apply(RelativeBias(buckets, weight), out, weight, op=layer_of(weight, "relative_bias"), saved=saved)


def buckets_of(tokens: int, buckets: int, largest: int, *, causal: bool) -> Any:
    """Return the bucket of each query and key, a host array (T, T) that repeats its rows. Without `causal` later keys
    have half of the buckets. Logarithms are in float32, as transformers has them."""
    import numpy as np

    ahead = np.arange(1 - tokens, tokens)
    later = np.zeros_like(ahead)
    if not causal:
        buckets //= 2
        later = (ahead > 0) * buckets
        ahead = -np.abs(ahead)
    apart, exact = np.maximum(-ahead, 0), buckets // 2
    wide = np.log(np.maximum(apart, 1).astype(np.float32) / np.float32(exact)) / np.float32(math.log(largest / exact))
    far = exact + (wide * np.float32(buckets - exact)).astype(np.int64)
    found = later + np.where(apart < exact, apart, np.minimum(far, buckets - 1))
    return np.lib.stride_tricks.sliding_window_view(found, tokens)[::-1]
