"""PowerSGD: each matrix as a product of two thin ones, which ranks average (arXiv 1905.13727, algorithm 1).

    M = gradient + residual;  P = M Q;  average P;  orthogonalize P;  Q = Mᵀ P;  average Q;  M' = P Qᵀ

The residual is M - M'. Q is reused in the next step (warm start). Tensors of one dimension, and matrices whose P and Q
would have more than half their elements, are averaged exactly. Stage 0 only, because P and Q need whole matrices. Sent
in place of rows x columns: r (rows + columns). Source: PyTorch 2.13, powerSGD_hook, whose order of operations this is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Kind
from zerosim.parallel.compression.encoded import code
from zerosim.parallel.exchange import AllReduce
from zerosim.parallel.gathers import AllGather
from zerosim.placement.partition import Whole
from zerosim.placement.rows import Row
from zerosim.placement.spec import FlatSpec
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import generator

LEAST_RATE = 2
"""A matrix is compressed if that divides its elements by more than this (torch's min_compression_rate)."""


class Matrix(NamedTuple):
    """A compressed weight of a flat buffer: its start, its rows and columns, and the starts of its P and Q."""

    offset: int
    rows: int
    columns: int
    rank: int
    p: int
    q: int


def matrices(spec: FlatSpec, rank: int) -> list[Matrix]:
    """Return the weights of a buffer that are compressed."""
    found, p, q = list[Matrix](), 0, 0
    for weight, offset in zip(spec.weights, spec.offsets, strict=True):
        if len(weight.shape) < 2:
            continue
        rows, columns = weight.shape[0], weight.numel // weight.shape[0]
        thin = min(rank, rows, columns)
        if thin * (rows + columns) * LEAST_RATE < rows * columns:
            found.append(Matrix(offset, rows, columns, thin, p, q))
            p, q = p + rows * thin, q + columns * thin
    return found


def exact_numel(spec: FlatSpec, rank: int) -> int:
    """Return how many elements of a buffer are averaged exactly."""
    return spec.numel - sum(one.rows * one.columns for one in matrices(spec, rank))


class Averaged(NamedTuple):
    """A flat whose gradient is already averaged: nothing is in flight."""

    grad: Buffer

    def wait(self) -> list[Buffer]:
        return [self.grad]


class PowerSGD(AllReduce):
    """Compress with rank `rank`; the first `warmup` steps average gradients exactly."""

    joins = False

    def __init__(self, gathers: AllGather, rank: int, warmup: int, seed: int) -> None:
        super().__init__(gathers)
        self.rank, self.warmup, self.seed = rank, warmup, seed
        self.states = {"residual": Row(Whole()), "q": Row(Whole())}
        self.keeps = {"residual": "rank", "q": "packed"}
        self.kept: dict[tuple[str, str], Buffer] = {}

    def place(self, flat: Flat, state: str) -> None:
        found = matrices(flat.spec, self.rank)
        numel = flat.padded_numel if state == "residual" else sum(one.columns * one.rank for one in found)
        kept = flat.device.alloc((numel,), flat.grad_dtype, Kind.OPTIM, name=state)
        self.kept[state, flat.name] = kept
        if state == "residual":
            flat.device.kernel(0, flat.device.backend.fill, kept.array, 0.0)
            return

        def draw(xp: Any, q: Array) -> None:
            q[...] = xp.asarray(generator("powersgd", self.seed, flat.name).standard_normal(q.size))
            for one in found:
                orthogonalize(xp, _of(q, one.q, one.columns, one.rank))

        if found:
            code(flat.device, "powersgd_start", draw, 0, kept.array)

    def launch_reduce(self, flats: Sequence[Flat], grads: list[Buffer]) -> Any:
        [flat], grad = flats, grads.pop()
        found = matrices(flat.spec, self.rank)
        if flat.device.where.step < self.warmup or not found:
            return super().launch_reduce(flats, [grad])
        with flat.device.scope(unit=flat.spec.module):
            self._average(flat, grad, found)
        return Averaged(grad)

    launch_in_place = launch_reduce

    def _average(self, flat: Flat, grad: Buffer, found: Sequence[Matrix]) -> None:
        device, comm = flat.device, self.group_of(flat)
        residual, q = (self.kept[state, flat.name] for state in ("residual", "q"))
        windows = [(one.offset, one.offset + one.rows * one.columns) for one in found]
        exact = exact_numel(flat.spec, self.rank)
        rest = device.alloc((exact,), grad.dtype, Kind.COMM)
        p = device.alloc((sum(one.rows * one.rank for one in found),), grad.dtype, Kind.COMM)
        flops = 2 * sum(one.rows * one.columns * one.rank for one in found)

        def make_p(xp: Any, grad: Array, residual: Array, rest: Array, p: Array, q: Array) -> None:
            _outside(grad, rest, windows, into=True)
            for (start, stop), one in zip(windows, found, strict=True):
                grad[start:stop] += residual[start:stop]
                m = grad[start:stop].reshape(one.rows, one.columns)
                _of(p, one.p, one.rows, one.rank)[...] = m @ _of(q, one.q, one.columns, one.rank)

        def make_q(xp: Any, grad: Array, p: Array, q: Array) -> None:
            for (start, stop), one in zip(windows, found, strict=True):
                thin = _of(p, one.p, one.rows, one.rank)
                orthogonalize(xp, thin)
                m = grad[start:stop].reshape(one.rows, one.columns)
                _of(q, one.q, one.columns, one.rank)[...] = m.T @ thin

        def put(xp: Any, grad: Array, residual: Array, rest: Array, p: Array, q: Array) -> None:
            _outside(grad, rest, windows, into=False)
            for (start, stop), one in zip(windows, found, strict=True):
                thin, wide = _of(p, one.p, one.rows, one.rank), _of(q, one.q, one.columns, one.rank)
                residual[start:stop] = grad[start:stop]
                grad[start:stop] = (thin @ wide.T).reshape(-1)
                residual[start:stop] -= grad[start:stop]

        everything = grad.array, residual.array, rest.array, p.array, q.array
        code(device, "powersgd_p", make_p, flops, *everything)
        if exact:
            comm.all_reduce(rest)
        comm.all_reduce(p)
        code(device, "powersgd_q", make_q, flops, grad.array, p.array, q.array)
        comm.all_reduce(q)
        code(device, "powersgd_put", put, flops, *everything)


def orthogonalize(xp: Any, columns: Array, eps: float = 0.0) -> None:
    """Make columns (rows, r) orthonormal one after the other, in place (Gram-Schmidt)."""
    for at in range(columns.shape[1]):
        column = columns[:, at : at + 1]
        norm = xp.sqrt((column * column).sum())
        column /= xp.where(norm > eps, norm, xp.ones_like(norm))
        rest = columns[:, at + 1 :]
        rest -= (column * rest).sum(axis=0) * column


def _of(buffer: Array, start: int, rows: int, columns: int) -> Array:
    return buffer[start : start + rows * columns].reshape(rows, columns)


def _outside(grad: Array, rest: Array, windows: Sequence[tuple[int, int]], *, into: bool) -> None:
    """Copy everything outside the windows of `grad` into `rest`, or back."""
    at, end = 0, 0
    for start, stop in [*windows, (grad.size, grad.size)]:
        numel = start - end
        if into:
            rest[at : at + numel] = grad[end:start]
        else:
            grad[end:start] = rest[at : at + numel]
        at, end = at + numel, stop
