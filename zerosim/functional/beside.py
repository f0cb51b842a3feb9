"""Two tensors side by side, and a loss beside the stream.

B batch, T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerosim.device.device import Buffer
from zerosim.functional.common import Grads, like, one_like, rows_of
from zerosim.functional.loss import MakeGrad
from zerosim.tensor.tensor import Outline, Tensor, apply, outline


@dataclass(frozen=True, slots=True)
class Beside:
    """Saves nothing: each gets its columns of the gradient."""

    parts: tuple[Outline, ...]

    def backward(self, grad: Buffer) -> Grads:
        found, first, copy = list[Buffer | None](), 0, grad.device.backend.copy
        for part in self.parts:
            dx, columns = part.new_grad(), slice(first, first := first + part.shape[-1])
            grad.device.kernel(0, copy, rows_of(grad.array)[:, columns], rows_of(dx.array))
            found.append(dx)
        return tuple(found)


def beside(*parts: Tensor) -> Tensor:
    """Return tensors side by side, as torch.cat along the last dim. Shapes: each (..., D), result (..., sum of D)."""
    out, first = like(parts[0], *parts[0].shape[:-1], sum(part.shape[-1] for part in parts)), 0
    for part in parts:
        columns = slice(first, first := first + part.shape[-1])
        out.device.kernel(0, out.device.backend.copy, rows_of(part.array), rows_of(out.array)[:, columns])
    return apply(Beside(tuple(map(outline, parts))), out, *parts, op="beside")


@dataclass(frozen=True, slots=True)
class WithLoss:
    """Saves the loss, which it gives the gradient 1: the loss's own rule knows its factor."""

    loss: Buffer

    def backward(self, grad: Buffer) -> Grads:
        return grad, one_like(self.loss)


@dataclass(frozen=True, slots=True)
class OfLogits:
    """Saves what makes the gradient of logits whose loss is computed already; it knows its factor."""

    make_grad: MakeGrad

    def backward(self, grad: Buffer) -> Grads:
        return (self.make_grad(),)


def with_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return x, whose backward starts that of a loss too (Megatron's MTPLossAutoScaler). Shapes: x any, loss (1)."""
    return apply(WithLoss(loss.buffer), x.buffer, x, loss, op="with_loss", saved={"loss": loss.buffer})
