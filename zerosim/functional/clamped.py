"""gpt-oss's function between an expert's maps: SwiGLU with clamped inputs, and one added to what the gate multiplies.

    gate * sigmoid(alpha gate) * (up + 1), with gates of at most `limit`, and ups from -limit to limit

The columns are a gate and its up, the next gate and its up, and so on: a cut between two pairs leaves both whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.device.device import Buffer
from zerosim.errors import InputError
from zerosim.functional.common import Grads, like, rows_of
from zerosim.tensor.discarded import Readable, held
from zerosim.tensor.tensor import Tensor, apply

ALPHA, LIMIT = 1.702, 7.0
"""gpt-oss's."""


@dataclass(frozen=True, slots=True)
class Clamped:
    """Saves x."""

    x: Readable
    alpha: float
    limit: float

    def backward(self, grad: Buffer) -> Grads:
        dx = self.x.new_grad()
        arrays = rows_of(grad.array), rows_of(self.x.array), self.alpha, self.limit, rows_of(dx.array)
        grad.device.kernel(16 * grad.numel, grad.device.backend.clamped_swiglu_backward, *arrays)
        return (dx,)


def clamped_swiglu(x: Tensor, alpha: float = ALPHA, limit: float = LIMIT) -> Tensor:
    """Return the function of neighbouring columns. Shapes: x (..., 2F), result (..., F).

    Raises: InputError for an odd number of columns.
    """
    if x.shape[-1] % 2:
        raise InputError(f"clamped_swiglu: {x.shape[-1]} columns are not pairs of a gate and what it gates")
    out = like(x, *x.shape[:-1], x.shape[-1] // 2)
    arrays = rows_of(x.array), alpha, limit, rows_of(out.array)
    x.device.kernel(9 * out.numel, x.device.backend.clamped_swiglu, *arrays)
    return apply(Clamped(held(x), alpha, limit), out, x, op="clamped_swiglu", saved={"input": held(x)})
