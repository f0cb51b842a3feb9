"""Layer norms without a bias of each head of q and of k inside packed q|k|v (Cohere's); values are copied.

Weights are of E numbers for all heads, or of a head's own. The op is composed of primitive ones, with TEMP buffers like
q in the compute dtype: two in forward, three in backward. M rows, H heads, E columns of one.

Saved for backward beside qkv: two numbers for each row and head, in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import compute_dtype
from zerosim.errors import InputError
from zerosim.functional.common import Grads, copy_columns, like, rows_of
from zerosim.tensor.discarded import Readable, held
from zerosim.tensor.tensor import Operand, Tensor, apply


@dataclass(frozen=True, slots=True)
class Part:
    """The heads of q or of k: their columns, their weight, and the mean and the root of each row and head."""

    columns: slice
    weight: Operand
    heads: int
    mean: Buffer
    root: Buffer

    def column(self, numbers: Buffer) -> Array:
        """View a number for each row and head as (M, H, 1)."""
        return numbers.array.reshape(-1, self.heads, 1)

    def wide(self, source: Readable | Buffer) -> Buffer:
        """Copy the part's columns to a TEMP of the compute dtype, (M, H, E)."""
        rows = rows_of(source.array)[:, self.columns]
        shape = rows.shape[0], self.heads, rows.shape[1] // self.heads
        copy = source.device.alloc(shape, compute_dtype(source.dtype), Kind.TEMP)
        source.device.kernel(0, source.device.backend.copy, rows, copy.array.reshape(*rows.shape))
        return copy

    def average(self, values: Buffer, into: Buffer) -> None:
        """Average each row of each head."""
        device, k, numbers = values.device, values.device.backend, into.array
        device.kernel(values.numel, k.sum_to, values.array, self.column(into))
        device.kernel(into.numel, k.divide, numbers, float(values.shape[-1]), numbers)

    def store(self, values: Buffer, out: Buffer) -> None:
        into = rows_of(out.array)[:, self.columns]
        out.device.kernel(0, out.device.backend.copy, values.array.reshape(*into.shape), into)


def head_layer_norm(
    qkv: Tensor, q_weight: Operand, k_weight: Operand, num_heads: int, num_kv_heads: int, eps: float = 1e-5
) -> Tensor:
    """Return q|k|v with q and k as (x - mean) / sqrt(variance + eps) * weight of each head.

    Shapes: qkv and result (B, T, (H + 2K) E); weights (E), or (H, E) and (K, E).

    Raises: InputError if the heads do not divide the columns, or a weight is of neither shape.
    """
    each, rest = divmod(qkv.shape[-1], num_heads + 2 * num_kv_heads)
    if rest:
        raise InputError(
            f"head_layer_norm: {num_heads} + 2 * {num_kv_heads} heads do not divide {qkv.shape[-1]} columns"
        )
    device, k, out, parts = qkv.device, qkv.device.backend, like(qkv), list[Part]()
    rows, start = rows_of(qkv.array).shape[0], 0
    for heads, weight in ((num_heads, q_weight), (num_kv_heads, k_weight)):
        if weight.shape not in ((each,), (heads, each)):
            raise InputError(f"head_layer_norm: weight {weight.shape}: expected ({each},) or ({heads}, {each})")
        stats = (device.alloc((rows * heads,), compute_dtype(qkv.dtype), Kind.ACTIVATION) for _ in range(2))
        part = Part(slice(start, start + heads * each), weight, heads, *stats)
        x, root = part.wide(qkv), part.root.array
        part.average(x, part.mean)
        device.kernel(x.numel, k.subtract, x.array, part.column(part.mean), x.array)
        squares = device.alloc(x.shape, x.dtype, Kind.TEMP)
        device.kernel(x.numel, k.multiply, x.array, x.array, squares.array)
        part.average(squares, part.root)
        device.kernel(part.root.numel, k.add, root, eps, root)
        device.kernel(part.root.numel, k.sqrt, root, root)
        device.kernel(x.numel, k.divide, x.array, part.column(part.root), x.array)
        device.kernel(x.numel, k.multiply, x.array, weight.array, x.array)
        part.store(x, out)
        del x, squares
        parts.append(part)
        start = part.columns.stop
    copy_columns(qkv, out, start)
    saved = {"q, k, v": held(qkv)} | {
        f"{name} of {which}": stat
        for which, part in zip("qk", parts, strict=True)
        for name, stat in (("mean", part.mean), ("root", part.root))
    }
    return apply(HeadLayerNorm(held(qkv), parts), out, qkv, q_weight, k_weight, op="head_norm", saved=saved)


@dataclass(frozen=True, slots=True)
class HeadLayerNorm:
    """Saves qkv, and of each row and head the mean and the root of the variance."""

    x: Readable
    parts: list[Part]

    def backward(self, grad: Buffer) -> Grads:
        dx = self.x.new_grad()
        dweights = list(self._of_parts(grad, dx))
        copy_columns(grad, dx, self.parts[-1].columns.stop)
        return dx, *dweights

    def _of_parts(self, grad: Buffer, dx: Buffer) -> Iterator[Buffer | None]:
        """With n = (x - mean) / root and g = grad * weight: dx = (g - average(g) - n * average(g * n)) / root."""
        device, k = grad.device, grad.device.backend
        for part in self.parts:
            normed, g = part.wide(self.x), part.wide(grad)
            product, slope = (device.alloc(shape, g.dtype, Kind.TEMP) for shape in (g.shape, part.mean.shape))
            size, root = g.numel, part.column(part.root)
            device.kernel(size, k.subtract, normed.array, part.column(part.mean), normed.array)
            device.kernel(size, k.divide, normed.array, root, normed.array)
            device.kernel(size, k.multiply, g.array, normed.array, product.array)
            dweight = part.weight.new_grad() if part.weight.requires_grad else None
            if dweight is not None:
                device.kernel(size, k.sum_to, product.array, dweight.array)
            device.kernel(size, k.multiply, product.array, part.weight.array, product.array)
            part.average(product, slope)
            device.kernel(size, k.multiply, normed.array, part.column(slope), normed.array)
            device.kernel(size, k.multiply, g.array, part.weight.array, g.array)
            part.average(g, slope)
            device.kernel(size, k.subtract, g.array, part.column(slope), g.array)
            device.kernel(size, k.subtract, g.array, normed.array, g.array)
            device.kernel(size, k.divide, g.array, root, g.array)
            part.store(g, dx)
            del normed, g, product, slope
            yield dweight
