"""Rotary positions (arXiv 2104.09864), applied to the query and key columns of packed q|k|v.

B batch, T tokens, H query heads, K key and value heads, E columns of one head. A head's columns i and
i + E/2 are one pair (the convention of Hugging Face's Llama, whose released weights are permuted for
it), rotated by the angle t * base^(-2i/E) at position t. `backends.forms.Rope` has the variants of other families.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zerosim.backends.forms import ROPE, Rope
from zerosim.device.device import Buffer
from zerosim.errors import InputError
from zerosim.functional.common import Grads, grad_like, like, rows_of
from zerosim.tensor.tensor import Tensor, apply


@dataclass(frozen=True, slots=True)
class Rotary:
    """Saves nothing: backward rotates the gradient back by the same angles, which it recomputes. `before`: q and k
    before the rotation, which live as long as v where v is a view of the same buffer (litgpt)."""

    head_dim: int
    heads: int
    rope: Rope
    positions: Sequence[range]
    before: Buffer | None = None

    def backward(self, grad: Buffer) -> Grads:
        dx = grad_like(grad)
        _rotate(grad, self.head_dim, self.heads, self.rope, True, dx, self.positions)
        return (dx,)


def rotary(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    rope: Rope = ROPE,
    positions: Sequence[range] = (),
    keeps: bool = False,
) -> Tensor:
    """Rotate q and k by their positions, 0 .. T-1 if none are given, and leave v unchanged. Shapes: qkv and result
    (B, T, (H + 2K) E). `keeps`: q and k before the rotation are saved too.

    Raises: InputError if the heads do not divide the columns, the columns of a head that turn are odd or more than E,
    or a table of frequencies has another length.
    """
    width, all_heads = qkv.shape[-1], num_heads + 2 * num_kv_heads
    head_dim, rest = divmod(width, all_heads)
    if rest:
        raise InputError(f"rotary: {num_heads} + 2 * {num_kv_heads} heads do not divide {width} columns")
    turned = rope.turned or head_dim
    if turned % 2:
        raise InputError(f"rotary: a head of {turned} columns cannot be cut into pairs: choose an even size")
    if turned > head_dim:
        raise InputError(f"rotary: {turned} columns of a head of {head_dim} cannot turn: choose {head_dim} at most")
    if rope.frequencies and len(rope.frequencies) != turned // 2:
        raise InputError(f"rotary: {len(rope.frequencies)} frequencies for {turned // 2} pairs: give one for each")
    out = like(qkv)
    positions = positions or (range(qkv.shape[1]),)
    _rotate(qkv.buffer, head_dim, num_heads + num_kv_heads, rope, False, out, positions)
    before = like(qkv, *qkv.shape[:-1], (num_heads + num_kv_heads) * head_dim) if keeps else None
    if before is not None:
        source = rows_of(qkv.array)[:, : before.shape[-1]]
        qkv.device.kernel(0, qkv.device.backend.copy, source, rows_of(before.array))
    rule = Rotary(head_dim, num_heads + num_kv_heads, rope, positions, before)
    return apply(rule, out, qkv, op="rotary", saved={"q, k before": before} if keeps else {})


def _rotate(
    x: Buffer, head_dim: int, heads: int, rope: Rope, inverse: bool, out: Buffer, positions: Sequence[range]
) -> None:
    at, turned = 0, heads * (rope.turned or head_dim)
    for run in positions:
        here, rows = slice(at, at + len(run)), x.shape[0] * len(run)
        source, into = (x.array[:, here], out.array[:, here]) if len(positions) > 1 else (x.array, out.array)
        of_run = rope._replace(first=run.start)
        x.device.kernel(3 * rows * turned, x.device.backend.rotary, source, head_dim, heads, of_run, inverse, into)
        at += len(run)
