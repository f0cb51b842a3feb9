"""Activations: GPT-2's GELU and Llama's SwiGLU (arXiv 2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.device.device import Buffer
from zerosim.errors import InputError
from zerosim.functional.common import Grads, grad_like, like, rows_of
from zerosim.tensor.discarded import Readable, held
from zerosim.tensor.tensor import Tensor, apply


@dataclass(frozen=True, slots=True)
class Gelu:
    """Saves x; backward recomputes the tanh, as fused GPU kernels do."""

    x: Readable

    def backward(self, grad: Buffer) -> Grads:
        dx = grad_like(grad)
        grad.device.kernel(16 * grad.numel, grad.device.backend.gelu_backward, grad.array, self.x.array, dx.array)
        return (dx,)


def gelu(x: Tensor) -> Tensor:
    """Return 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), GPT-2's GELU. Shapes: x and result any, the same.

    Source: arXiv 1606.08415.
    """
    out = like(x)
    x.device.kernel(8 * out.numel, x.device.backend.gelu, x.array, out.array)
    return apply(Gelu(held(x)), out, x, op="gelu", saved={"input": held(x)})


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """Saves x; backward recomputes the sigmoid."""

    x: Readable

    def backward(self, grad: Buffer) -> Grads:
        dx = self.x.new_grad()
        rows = rows_of(grad.array), rows_of(self.x.array), rows_of(dx.array)
        grad.device.kernel(10 * grad.numel, grad.device.backend.swiglu_backward, *rows)
        return (dx,)


def swiglu(x: Tensor) -> Tensor:
    """Return gate * sigmoid(gate) * up. Shapes: x (..., 2F) with columns gate|up; result (..., F).

    Raises: InputError for an odd number of columns.
    """
    if x.shape[-1] % 2:
        raise InputError(f"swiglu: {x.shape[-1]} columns are not two halves, a gate and what it gates")
    out = like(x, *x.shape[:-1], x.shape[-1] // 2)
    x.device.kernel(6 * out.numel, x.device.backend.swiglu, rows_of(x.array), rows_of(out.array))
    return apply(SwiGLU(held(x)), out, x, op="swiglu", saved={"input": held(x)})
