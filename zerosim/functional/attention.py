"""The attention core: softmax(q kᵀ) v, heads side by side.

B batch, T tokens, D width, H heads.
"""

from __future__ import annotations

from zerosim.device import Buffer, Kind
from zerosim.errors import InputError
from zerosim.functional.common import Grads, like
from zerosim.functional.dropout import dropout_mask
from zerosim.tensor import Tensor, apply


class Attention:
    """Saves qkv, the probabilities (B, H, T, T) and, with dropout, its 1-byte mask."""

    def __init__(self, qkv: Tensor, num_heads: int, probs: Buffer, mask: Buffer | None, keep: float) -> None:
        self.qkv = qkv
        self.num_heads = num_heads
        self.probs = probs
        self.mask = mask
        self.keep = keep

    def backward(self, grad: Buffer) -> Grads:
        device = grad.device
        dqkv = self.qkv.new_grad()
        workspace = device.alloc(self.probs.shape, self.probs.dtype, Kind.TEMP)
        device.kernel(
            8 * self.probs.numel * (grad.shape[-1] // self.num_heads),
            device.backend.attention_backward,
            grad.array,
            self.qkv.array,
            self.num_heads,
            self.probs.array,
            None if self.mask is None else self.mask.array,
            self.keep,
            workspace.array,
            dqkv.array,
        )
        return (dqkv,)


def attention(qkv: Tensor, num_heads: int, *, dropout: float = 0.0, key: tuple[int, int] = (0, 0)) -> Tensor:
    """Causal self-attention, heads side by side, scale 1/sqrt(D/H).

    Shapes: qkv (B, T, 3D) with columns q|k|v, each cut into H heads; result (B, T, D). `dropout` is
    the chance that a probability is dropped, `key` names its random numbers.
    """
    device = qkv.device
    batch, tokens, width = qkv.shape
    if width % (3 * num_heads):
        raise InputError(f"attention: {num_heads} heads do not divide a third of {width} columns")
    out = like(qkv, batch, tokens, width // 3)
    probs = like(qkv, batch, num_heads, tokens, tokens)
    mask = dropout_mask(qkv, probs.shape, dropout, key)
    device.kernel(
        4 * probs.numel * (width // 3 // num_heads),
        device.backend.attention,
        qkv.array,
        num_heads,
        None if mask is None else mask.array,
        1.0 - dropout,
        out.array,
        probs.array,
    )
    return apply(Attention(qkv, num_heads, probs, mask, 1.0 - dropout), out, qkv)
