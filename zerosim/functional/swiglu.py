"""SwiGLU (arXiv 2002.05202): one half of the columns gates the other. F width of the result."""

from __future__ import annotations

from zerosim.device.device import Buffer
from zerosim.errors import InputError
from zerosim.functional.common import Grads, like, rows_of
from zerosim.tensor.tensor import Tensor, apply


class SwiGLU:
    """Saves x; the sigmoid is computed again in backward."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def backward(self, grad: Buffer) -> Grads:
        device, dx = grad.device, self.x.new_grad()
        device.kernel(
            10 * grad.numel,
            device.backend.swiglu_backward,
            rows_of(grad.array),
            rows_of(self.x.array),
            rows_of(dx.array),
        )
        return (dx,)


def swiglu(x: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up. Shapes: x (..., 2F) with columns gate|up; result (..., F).

    Raises: InputError for an odd number of columns.
    """
    if x.shape[-1] % 2:
        raise InputError(f"swiglu: {x.shape[-1]} columns are not two halves, a gate and what it gates")
    out = like(x, *x.shape[:-1], x.shape[-1] // 2)
    x.device.kernel(6 * out.numel, x.device.backend.swiglu, rows_of(x.array), rows_of(out.array))
    return apply(SwiGLU(x), out, x, op="swiglu", saved={"input": x})
