"""Keys and values repeated to all heads of queries, for an attention kernel without grouped queries; a copy;
and keys and values that outlive backward.

B batch, T tokens, H query heads, K heads of keys and values, d width of a head. transformers' `repeat_kv`: versions
4.45 and 4.48 do so before every SDPA kernel, 4.45 before Mistral's flash attention, which then saves 2H heads of keys
and values in place of 2K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Kind
from zerosim.functional.common import Grads, like, rows_of
from zerosim.tensor.autograd import Node
from zerosim.tensor.tensor import Tensor, apply


@dataclass(frozen=True, slots=True)
class Repeated:
    """Saves nothing: backward adds up the gradients of a head's copies, in their order."""

    heads: int
    kv_heads: int
    times: int
    columns: int

    def backward(self, grad: Buffer) -> Grads:
        device, k = grad.device, grad.device.backend
        dx = device.alloc((*grad.shape[:-1], self.columns), grad.dtype, Kind.ACTIVATION_GRAD)
        for number, (source, into) in enumerate(self.pairs(grad.array, dx.array)):
            if number < 2:
                device.kernel(0, k.copy, source, into)
            else:
                device.kernel(source.size, k.add, into, source, into)
        return (dx,)

    def pairs(self, wide: Array, packed: Array) -> Iterator[tuple[Array, Array]]:
        """Yield the columns of queries in both, then those of each copy of keys and values with their original."""
        heads, width = self.heads, self.columns // (self.heads + 2 * self.kv_heads)
        wide, packed = (of.reshape(-1, of.shape[-1] // width, width) for of in (wide, packed))
        yield wide[:, :heads], packed[:, :heads]
        for copy in range(self.times):
            yield wide[:, heads + copy :: self.times], packed[:, heads:]


def repeat_kv(qkv: Tensor, num_heads: int, num_kv_heads: int, times: int = 0) -> Tensor:
    """Return q|k|v with each head of keys and values repeated `times` times, by default H/K, for its group of query
    heads. Shapes: qkv (B, T, (H + 2K) d), result (B, T, (H + 2K times) d)."""
    times = times or num_heads // num_kv_heads
    width = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    out = like(qkv, *qkv.shape[:-1], (num_heads + 2 * num_kv_heads * times) * width)
    rule = Repeated(num_heads, num_kv_heads, times, qkv.shape[-1])
    for into, source in rule.pairs(out.array, qkv.array):
        qkv.device.kernel(0, qkv.device.backend.copy, source, into)
    return apply(rule, out, qkv, op="repeat_kv")


@dataclass(frozen=True, slots=True)
class Copied:
    """Saves nothing: the gradient passes."""

    def backward(self, grad: Buffer) -> Grads:
        return (grad,)


def copied(x: Tensor) -> Tensor:
    """Return a copy of x, as reshaping makes of a result whose heads lie before its tokens."""
    out = like(x)
    x.device.kernel(0, x.device.backend.copy, x.array, out.array)
    return apply(Copied(), out, x, op="copied")


@dataclass(frozen=True, slots=True)
class Returned:
    """Saves q|k|v. When backward frees them, the columns of keys and values stay, in a buffer that `keep` gets."""

    qkv: Tensor
    columns: int
    keep: Callable[[Buffer], None]

    def backward(self, grad: Buffer) -> Grads:
        device, kept = grad.device, grad.device.alloc((*grad.shape[:-1], self.columns), grad.dtype, Kind.KEPT)
        device.kernel(0, device.backend.copy, rows_of(self.qkv.array)[:, -self.columns :], rows_of(kept.array))
        self.keep(kept)
        return (grad,)


def returned_kv(qkv: Tensor, columns: int, keep: Callable[[Buffer], None]) -> Tensor:
    """Return q|k|v, whose last columns, keys and values, the model returns to its caller."""
    if qkv.node is None:
        return qkv
    return Tensor(qkv.buffer, Node(Returned(Tensor(qkv.buffer), columns, keep), (qkv.node,)))
