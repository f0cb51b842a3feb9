"""RMS norms of queries and keys inside packed q|k|v, before they are rotated; values are copied.

    plain       no weight. Each head is a row of its own (Llama 4's)
    by head     a weight of E numbers, the same for all heads (Qwen3's, Gemma 3's). Each head is a row of its own
    over all    a weight of as many numbers as all heads have columns (OLMo 2's). A token's queries are one row

B batch, T tokens, M = B T, H query heads, K heads of keys and values, E columns of one. A norm over all heads that a
group of ranks divides needs one sum of squares a row from every rank, of queries and of keys in one exchange, and one
of slopes in backward. It runs as primitive ops, with TEMP buffers in the compute dtype: two like q in backward.

Saved for backward beside qkv: a number for each row and head, in the compute dtype. In place of qkv, with `saves`
'eager' and a half type: q and k in the compute dtype and, of a trained weight, what it multiplies, as in `norm.py`.
Norms over a group's ranks save qkv.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import compute_dtype
from zerosim.errors import InputError
from zerosim.functional.common import Grads, copy_columns, like, rows_of
from zerosim.functional.policy import DEFAULT, ActivationPolicy
from zerosim.tensor.discarded import Readable, held
from zerosim.tensor.tensor import Operand, Outline, Saved, Tensor, apply, outline


class Sharing(Protocol):
    """A group of ranks that divide the heads: `nn.group.WholeMaps`."""

    size: int

    def sum_over(self, buffer: Buffer) -> None:
        """Add up every rank's buffer, in place."""


class Part(NamedTuple):
    """The columns of q or of k, and the weight of their norm, if it has one."""

    columns: slice
    weight: Operand | None


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms besides their input: q's and k's part, the group over which their rows are divided, if any, and the
    columns of a head."""

    parts: tuple[Part, Part]
    eps: float
    offset: float
    group: Sharing | None
    each: int = 0

    def weight(self, part: Part, like: Readable | Outline | Buffer) -> Operand | Buffer:
        """Return a part's weight: ones, if it has none."""
        if part.weight is not None:
            return part.weight
        ones = like.device.alloc((self.each,), compute_dtype(like.dtype), Kind.TEMP)
        like.device.kernel(0, like.device.backend.fill, ones.array, 1.0)
        return ones

    def of(self, *buffers: Readable | Buffer) -> Iterator[tuple[Part, list[Array]]]:
        """Yield each part with its columns of the buffers, as views (M, C)."""
        rows = [rows_of(buffer.array) for buffer in buffers]
        for part in self.parts:
            yield part, [one[:, part.columns] for one in rows]


def head_norm(
    qkv: Tensor,
    q_weight: Operand | None,
    k_weight: Operand | None,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-5,
    *,
    plus_one: bool = False,
    rounds_last: bool = False,
    group: Sharing | None = None,
    policy: ActivationPolicy = DEFAULT,
) -> Tensor:
    """Return q|k|v with RMS norms of q and of k: of each head or, with weights that long, over all heads.

    With `plus_one` the factors are 1 + weight. `rounds_last`: as in `rms_norm`. `group` divides the heads of a norm
    over all of them. Shapes: qkv and result (B, T, (H + 2K) E); weights (E), or (H E) and (K E).

    Raises: InputError if the heads do not divide the columns, or weights are of neither kind.
    """
    each, rest = divmod(qkv.shape[-1], num_heads + 2 * num_kv_heads)
    if rest:
        raise InputError(f"head_norm: {num_heads} + 2 * {num_kv_heads} heads do not divide {qkv.shape[-1]} columns")
    wide, narrow = num_heads * each, num_kv_heads * each
    shapes = [None if weight is None else weight.shape for weight in (q_weight, k_weight)]
    if shapes not in ([(each,), (each,)], [(wide,), (narrow,)], [None, None]):
        raise InputError(
            f"head_norm: weights of shapes {shapes[0]} and {shapes[1]}: expected ({each},) twice for a norm by head, "
            f"or ({wide},) and ({narrow},) for one over all heads"
        )
    parts = Part(slice(0, wide), q_weight), Part(slice(wide, wide + narrow), k_weight)
    norms, out = Norms(parts, eps, float(plus_one), group if group and group.size > 1 else None, each), like(qkv)
    stats = _by_row(qkv, norms, out) if norms.group is None else _over_ranks(qkv, norms, out, norms.group)
    copy_columns(qkv, out, parts[1].columns.stop)
    rule = HeadNorm(held(qkv), norms, stats)
    if policy.saves == "eager" and norms.group is None and qkv.dtype != compute_dtype(qkv.dtype):
        rule = HeadNorm(outline(qkv), norms, stats, *_eager(qkv, norms, stats, rounds_last))
    weights = [weight for weight in (q_weight, k_weight) if weight is not None]
    return apply(rule, out, qkv, *weights, op="head_norm", saved=rule.saved())


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Saves qkv and a statistic of each row and head: 1 / the root of the average of squares or, over a group's ranks,
    the root. In place of qkv: `copies` of q and k, and what backward does not read again."""

    x: Readable | Outline
    norms: Norms
    stats: list[Buffer]
    copies: Sequence[Buffer] = ()
    normed: Sequence[Buffer] = ()

    def backward(self, grad: Buffer) -> Grads:
        norms, dx = self.norms, self.x.new_grad()
        weights = [part.weight for part in norms.parts]
        dweights = [None if one is None or not one.requires_grad else one.new_grad() for one in weights]
        if norms.group is None:
            self._by_row(grad, dx, dweights)
        else:
            self._over_ranks(grad, dx, dweights, norms.group)
        copy_columns(grad, dx, norms.parts[1].columns.stop)
        return dx, *(grad for grad, one in zip(dweights, weights, strict=True) if one is not None)

    def saved(self) -> Saved:
        kept = zip(("fp32 q", "fp32 k", "normalised q", "normalised k"), [*self.copies, *self.normed], strict=False)
        return {"q, k, v": self.x, "statistics of q": self.stats[0], "statistics of k": self.stats[1], **dict(kept)}

    def _input(self) -> Readable:
        assert not isinstance(self.x, Outline), "copies are read in its place"
        return self.x

    def _by_row(self, grad: Buffer, dx: Buffer, dweights: list[Buffer | None]) -> None:
        device, norms = grad.device, self.norms
        sources = [copy.array for copy in self.copies] or [x for _, (x,) in norms.of(self._input())]
        found = zip(norms.of(grad, dx), sources, self.stats, dweights, strict=True)
        for (part, (g, into)), x, stat, dweight in found:
            weight = norms.weight(part, self.x)
            arrays = g, x, weight.array, stat.array, into, dweight and dweight.array, norms.offset
            device.kernel(8 * x.size, device.backend.head_norm_backward, *arrays)

    def _over_ranks(self, grad: Buffer, dx: Buffer, dweights: list[Buffer | None], group: Sharing) -> None:
        """With n = x / root and g = grad * weight: dx = (g - n * average(g * n)) / root, dweight = sum(grad * n)."""
        device, k, norms, sums = grad.device, grad.device.backend, self.norms, _numbers(grad, Kind.TEMP)
        temps, slopes = list[tuple[Buffer, Buffer]](), _halves(sums)
        found = zip(norms.of(grad, self._input()), self.stats, slopes, dweights, strict=True)
        for (part, (g, x)), root, slope, dweight in found:
            normed, scaled, product = (_temp(x.shape, grad) for _ in range(3))
            device.kernel(x.size, k.divide, x, _column(root), normed.array)
            device.kernel(x.size, k.multiply, g, normed.array, product.array)
            if dweight is not None:
                device.kernel(x.size, k.column_sum, product.array, dweight.array)
            factors = _factors(part, norms)
            device.kernel(x.size, k.multiply, product.array, factors.array, product.array)
            device.kernel(x.size, k.sum_to, product.array, _column(slope))
            device.kernel(x.size, k.multiply, g, factors.array, scaled.array)
            temps.append((normed, scaled))
        _average(sums, norms, group)
        for (_, (into,)), root, slope, (normed, scaled) in zip(norms.of(dx), self.stats, slopes, temps, strict=True):
            device.kernel(into.size, k.multiply, normed.array, _column(slope), normed.array)
            device.kernel(into.size, k.subtract, scaled.array, normed.array, scaled.array)
            device.kernel(into.size, k.divide, scaled.array, _column(root), into)


def _by_row(qkv: Tensor, norms: Norms, out: Buffer) -> list[Buffer]:
    device, stats = qkv.device, list[Buffer]()
    for part, (x, into) in norms.of(qkv, out):
        shape = x.shape[0], x.shape[1] // (weight := norms.weight(part, qkv)).shape[0]
        stats.append(device.alloc(shape, compute_dtype(qkv.dtype), Kind.ACTIVATION))
        arrays = x, weight.array, norms.eps, into, stats[-1].array, norms.offset
        device.kernel(4 * x.size, device.backend.head_norm, *arrays)
    return stats


def _eager(qkv: Tensor, norms: Norms, stats: list[Buffer], rounds_last: bool) -> tuple[list[Buffer], list[Buffer]]:
    """Return copies of q and k in the compute dtype, and what trained weights multiply."""
    device, wide, copies, normed = qkv.device, compute_dtype(qkv.dtype), list[Buffer](), list[Buffer]()
    for (part, (x,)), stat in zip(norms.of(qkv), stats, strict=True):
        copies.append(device.alloc(x.shape, wide, Kind.ACTIVATION))
        device.kernel(0, device.backend.copy, x, copies[-1].array)
        if part.weight is not None and part.weight.requires_grad:
            normed.append(device.alloc(x.shape, wide if norms.offset or rounds_last else qkv.dtype, Kind.ACTIVATION))
            by_row = [buffer.array.reshape(-1, part.weight.shape[0]) for buffer in (copies[-1], normed[-1])]
            device.kernel(x.size, device.backend.multiply, by_row[0], stat.array.reshape(-1, 1), by_row[1])
    return copies, normed


def _over_ranks(qkv: Tensor, norms: Norms, out: Buffer, group: Sharing) -> list[Buffer]:
    device, k, sums = qkv.device, qkv.device.backend, _numbers(qkv.buffer, Kind.ACTIVATION)
    roots = _halves(sums)
    for (_, (x,)), root in zip(norms.of(qkv), roots, strict=True):
        squares = _temp(x.shape, qkv.buffer)
        device.kernel(x.size, k.multiply, x, x, squares.array)
        device.kernel(x.size, k.sum_to, squares.array, _column(root))
    _average(sums, norms, group)
    device.kernel(sums.numel, k.add, sums.array, norms.eps, sums.array)
    device.kernel(sums.numel, k.sqrt, sums.array, sums.array)
    for (part, (x, into)), root in zip(norms.of(qkv, out), roots, strict=True):
        normed = _temp(x.shape, qkv.buffer)
        device.kernel(x.size, k.divide, x, _column(root), normed.array)
        device.kernel(x.size, k.multiply, normed.array, _factors(part, norms).array, into)
    return roots


def _numbers(rows_like: Buffer, kind: Kind) -> Buffer:
    """Allocate a number for each row of q, then of k: side by side, so that one exchange adds both."""
    shape = (2 * (rows_like.numel // rows_like.shape[-1]),)
    return rows_like.device.alloc(shape, compute_dtype(rows_like.dtype), kind)


def _halves(both: Buffer) -> list[Buffer]:
    return [both[: both.numel // 2], both[both.numel // 2 :]]


def _average(sums: Buffer, norms: Norms, group: Sharing) -> None:
    """Add up the ranks' sums of rows and divide them by the columns of all ranks. Copies of a head of keys are added,
    and counted, once for each rank that has one."""
    group.sum_over(sums)
    for part, half in zip(norms.parts, _halves(sums), strict=True):
        columns = group.size * (part.columns.stop - part.columns.start)
        sums.device.kernel(half.numel, sums.device.backend.divide, half.array, float(columns), half.array)


def _temp(shape: tuple[int, ...], like: Buffer) -> Buffer:
    return like.device.alloc(shape, compute_dtype(like.dtype), Kind.TEMP)


def _factors(part: Part, norms: Norms) -> Operand | Buffer:
    assert part.weight is not None, "a norm over all heads has a weight"
    if not norms.offset:
        return part.weight
    factors = _temp(part.weight.shape, part.weight.buffer)
    factors.device.kernel(factors.numel, factors.device.backend.add, part.weight.array, norms.offset, factors.array)
    return factors


def _column(numbers: Buffer) -> Array:
    return numbers.array.reshape(-1, 1)
