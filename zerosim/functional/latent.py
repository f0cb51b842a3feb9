"""Latent attention between its maps (DeepSeek-V2, arXiv 2405.04434, section 2.1): columns of a latent, heads of q|k|v.

B batch, T tokens, H heads; a head of queries and keys has N plain columns and R rotated ones, of values V. All heads
share one rotated part of their keys. Neither op saves anything: what the maps made is freed when q|k|v is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerosim.backends.forms import Rope
from zerosim.device.device import Buffer
from zerosim.errors import InputError
from zerosim.functional.common import Grads, like, rows_of
from zerosim.tensor.tensor import Outline, Tensor, apply, outline


@dataclass(frozen=True, slots=True)
class Columns:
    """Saves nothing. The gradient of the other columns is 0."""

    x: Outline
    first: int

    def backward(self, grad: Buffer) -> Grads:
        dx, k = self.x.new_grad(), grad.device.backend
        rows, stop = rows_of(dx.array), self.first + grad.shape[-1]
        grad.device.kernel(0, k.copy, rows_of(grad.array), rows[:, self.first : stop])
        for others in (rows[:, : self.first], rows[:, stop:]):
            if others.size:
                grad.device.kernel(0, k.fill, others, 0.0)
        return (dx,)


def columns(x: Tensor, first: int, stop: int) -> Tensor:
    """Return a copy of some columns of each row. Shapes: x (..., C), result (..., stop - first)."""
    out = like(x, *x.shape[:-1], stop - first)
    x.device.kernel(0, x.device.backend.copy, rows_of(x.array)[:, first:stop], rows_of(out.array))
    return apply(Columns(outline(x), first), out, x, op="columns")


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Saves nothing but the shapes of its inputs."""

    inputs: tuple[Outline, ...]
    heads: int
    rope: Rope
    positions: Sequence[range]

    def backward(self, grad: Buffer) -> Grads:
        device, grads = grad.device, tuple(x.new_grad() for x in self.inputs)
        flops = 3 * grad.numel // grad.shape[-1] * (self.heads + 1) * (self.rope.turned or 0)
        for at, rope, share in _runs(self.rope, self.positions):
            arrays = grad.array[:, at], self.heads, rope, *(one.array[:, at] for one in grads)
            device.kernel(int(flops * share), device.backend.latent_heads_backward, *arrays)
        return grads


def latent_heads(
    q: Tensor, kv: Tensor, turned: Tensor, heads: int, *, rope: Rope, positions: Sequence[range] = ()
) -> Tensor:
    """Put q|k|v together: the last R columns of each head of q, and `turned`, which is part of every key, are rotated
    by their positions, 0 .. T-1 if none are given.

    Shapes: q (B, T, H (N + R)), kv (B, T, H (N + V)), turned (B, T, R), result (B, T, H (2 (N + R) + V)).

    Raises: InputError if the heads do not divide the columns, or R is odd or too large.
    """
    columns, both, shared = q.shape[-1], kv.shape[-1], turned.shape[-1]
    if columns % heads or both % heads or shared % 2 or not shared < columns // heads < shared + both // heads:
        raise InputError(
            f"latent_heads: {heads} heads with {shared} rotated columns do not fit {columns} columns of queries and "
            f"{both} of keys and values"
        )
    rope = rope._replace(turned=shared)
    if rope.frequencies and len(rope.frequencies) != shared // 2:
        raise InputError(f"latent_heads: {len(rope.frequencies)} frequencies for {shared // 2} pairs: one for each")
    out = like(q, *q.shape[:-1], 2 * columns + both - heads * (columns // heads - shared))
    positions = positions or (range(q.shape[1]),)
    inputs, flops = (q, kv, turned), 3 * q.shape[0] * q.shape[1] * (heads + 1) * shared
    for at, of_run, share in _runs(rope, positions):
        arrays = *(x.array[:, at] for x in inputs), heads, of_run, out.array[:, at]
        q.device.kernel(int(flops * share), q.device.backend.latent_heads, *arrays)
    rule = LatentHeads(tuple(map(outline, inputs)), heads, rope, positions)
    return apply(rule, out, *inputs, op="latent_heads")


def _runs(rope: Rope, positions: Sequence[range]) -> Iterator[tuple[slice, Rope, float]]:
    """Yield the tokens of each run, its rotation, and its share of all."""
    at, tokens = 0, sum(map(len, positions))
    for run in positions:
        yield slice(at, at + len(run)), rope._replace(first=run.start), len(run) / tokens
        at += len(run)
