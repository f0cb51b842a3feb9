"""Elementwise activations."""

from __future__ import annotations

from zerosim.device.device import Buffer
from zerosim.functional.common import Grads, grad_like, like
from zerosim.tensor.tensor import Tensor, apply


class Gelu:
    """Saves x; the tanh is computed again in backward, as the fused GPU kernels do."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def backward(self, grad: Buffer) -> Grads:
        dx = grad_like(grad)
        grad.device.kernel(16 * grad.numel, grad.device.backend.gelu_backward, grad.array, self.x.array, dx.array)
        return (dx,)


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form (GPT-2's)."""
    out = like(x)
    x.device.kernel(8 * out.numel, x.device.backend.gelu, x.array, out.array)
    return apply(Gelu(x), out, x, op="gelu", saved={"input": x})
