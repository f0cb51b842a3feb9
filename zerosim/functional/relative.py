"""T5's bias of scores: a number for each head and each bucket of distances between a query and a key (1910.10683).

T tokens, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.backends.forms import Buckets
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
    device.kernel(0, device.backend.relative_buckets, Buckets(weight.shape[0], largest, causal), buckets.array)
    rows = embedding_result(buckets, weight)
    out = device.alloc((weight.shape[1], tokens, tokens), weight.dtype, Kind.ACTIVATION)
    device.kernel(0, device.backend.copy, rows.array.transpose(2, 0, 1), out.array)
    saved = {"buckets": buckets, "weight": weight}
    return apply(RelativeBias(buckets, weight), out, weight, op=layer_of(weight, "relative_bias"), saved=saved)
