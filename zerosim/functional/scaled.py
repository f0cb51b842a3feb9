"""A tensor times a number: Gemma's embeddings, Granite's multipliers."""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.device.device import Buffer
from zerosim.functional.common import Grads, grad_like, like
from zerosim.tensor.tensor import Tensor, apply


@dataclass(frozen=True, slots=True)
class Scaled:
    """Saves nothing."""

    factor: float

    def backward(self, grad: Buffer) -> Grads:
        dx = grad_like(grad)
        grad.device.kernel(grad.numel, grad.device.backend.multiply, grad.array, self.factor, dx.array)
        return (dx,)


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return factor * x; for a factor of 1 x itself.

    A sum with a multiplied branch is x + scaled(y, factor): the product is a buffer that lives until it is added, as in
    transformers' Granite.
    """
    if factor == 1.0:
        return x
    out = like(x)
    x.device.kernel(out.numel, x.device.backend.multiply, x.array, factor, out.array)
    return apply(Scaled(factor), out, x, op="scaled")
