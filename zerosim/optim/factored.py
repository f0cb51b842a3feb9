"""Base of the optimizers that store for a matrix R for its rows and C for its columns, not a number for each weight.

A rank's slice of a flat buffer may begin and end in the middle of a matrix's row. The rank sums over its
slice, and two exchanges complete the sums. For k tensors in the buffer, with matrices (r, c):

    sums       g^2 over rows and columns, w^2 over all          first exchange, k + sum of (r + c) numbers
    factors    R and C take in the means; every rank with a piece of a matrix stores all of both
    update     U of R, C and g; U^2 over all                    second exchange, k numbers
    weights    U again, divided by its RMS

So a matrix costs r + c + 2 numbers, any other tensor 2, in the compute dtype. If ranks hold whole tensors, nothing
is exchanged. The order of the sums depends on the cut, so slices agree with the whole up to rounding.
U is live for one tensor at a time, as in a loop over tensors, and is therefore computed twice.

Tensors of zero or one dimension store a number for each weight. A stack of experts' matrices has an R and a C of each,
and one RMS, as both libraries have it.

Without fp32 masters sums are exchanged in fp32, and weights are rounded as `rounding.py` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import sqrt
from typing import Any, ClassVar, NamedTuple

from zerosim.backends.kernels import Array, Backend, Rule
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.work import VECTOR, KernelWork, work_of
from zerosim.dtypes import DType, compute_dtype, fp64
from zerosim.optim.optimizer import Add, Step
from zerosim.optim.pieces import LocalPiece, is_matrix, is_no_matrix, local_pieces, matrices_of, rectangles, sums_of
from zerosim.optim.states import StateArray, sized
from zerosim.placement.partition import Slice
from zerosim.placement.spec import FlatSpec, Overlap
from zerosim.tensor.flat import Flat


class Average(NamedTuple):
    """A step's contribution to an average of squares: the share `fresh` of sums divided by `divisor`."""

    fresh: float
    divisor: float


class Estimate(NamedTuple):
    """The origin of U's estimate of g^2: factors with R's mean, or number by number (`mean` 1)."""

    is_factored: bool
    mean: float
    eps: float


class Factored:
    """A subclass names its states and defines the rules, on flat arrays as in `Elementwise`.

    temporaries  arrays of a tensor's size that the library needs beside the states, for one tensor at a time
    widened      the same of bf16 weights without masters: temporaries and states are then in fp32. 0: both are in the
                 weights' format, and there are as many temporaries as ever
    tiny         added to each square
    """

    cut: ClassVar[str] = "sums"
    foreach_temporaries: ClassVar[int] = 0  # loops over tensors by default
    of_rows: ClassVar[str]
    of_columns: ClassVar[str]
    of_numbers: ClassVar[str]
    temporaries: ClassVar[int]
    widened: ClassVar[int] = 0
    tiny: ClassVar[float]

    @property
    def moments(self) -> tuple[str, ...]:
        """States with a number for each weight of any tensor."""
        return ()

    def average(self, xp: Any, kept: Array, sums: Array, now: Average) -> None:
        """Update an average with sums of squares."""
        raise NotImplementedError

    def factors(self, device: Device, kept: list[Buffer], means: Sequence[float]) -> list[Buffer]:
        """Return the factors of the outer product: R and C with R's mean in each matrix, or values derived from
        them."""
        return kept

    def direction(self, xp: Any, u: Array, g: Array, now: Estimate) -> None:
        """Compute U in place of the outer product, or of a copy of the average."""
        raise NotImplementedError

    def rates(self, now: Step, rms_weight: float, rms_update: float, *, decays: bool) -> Any:
        """Return the inputs of `move` for a tensor."""
        raise NotImplementedError

    def move(self, xp: Any, w: Array, u: Array, now: Any, *moments: Array) -> None:
        """Move the weights along U."""
        raise NotImplementedError

    # -- its states -------------------------------------------------------------------------------
    def arrays(self, spec: FlatSpec, own: Slice, dtype: DType) -> Sequence[StateArray]:
        kept = sized(self._factors(dtype), spec, own)
        kept += [StateArray(name, own.size, self.stored(dtype), own.padding) for name in self.moments]
        return [array for array in kept if array.numel]

    def stored(self, dtype: DType) -> DType:
        """Return the format of states and temporaries of weights in a format."""
        return compute_dtype(dtype) if self.widened else dtype

    def _factors(self, dtype: DType) -> list[StateArray]:
        dtype = self.stored(dtype)
        return [
            StateArray(self.of_rows, 0, dtype, 0, "rows", is_matrix),
            StateArray(self.of_columns, 0, dtype, 0, "columns", is_matrix),
            StateArray(self.of_numbers, 0, dtype, of=is_no_matrix),
        ]

    # -- a step ---------------------------------------------------------------------------------------
    def step(self, flat: Flat, now: Step, add: Add) -> None:
        device, stored, count = flat.device, flat.weights().dtype, sum(map(matrices_of, flat.spec.weights))
        held, fresh = local_pieces(self._factors(stored), flat.spec, flat.own), float(now.number) ** -0.8
        dtype = compute_dtype(stored)
        exact = _zeros(device, count, fp64)  # a sum for each matrix; 0 for tensors on other ranks
        sums = _zeros(device, count + sum(map(sums_of, flat.spec.weights)), dtype)
        for one in held:
            self._add_up(flat, one, now.grad_scale, fresh, sums, exact)
        weights = _exchange(exact, sums, add)
        for one in held:
            if one.is_matrix:
                self._take_in(flat, one, fresh, sums, exact)
        del sums
        of_rows = device.backend.to_host(exact.array)
        means = [
            [float(total) / one.matrix[0] for total in of_rows[one.numbers]] if one.is_matrix else [1.0] for one in held
        ]
        for one, mean in zip(held, means, strict=True):
            self._square_update(flat, one, now.grad_scale, mean, exact)
        updates = _exchange(exact, _zeros(device, count, dtype), add)
        for one, mean in zip(held, means, strict=True):
            of_all = (float(squares[one.number]) / one.weight.numel for squares in (weights, updates))
            rates = self.rates(now, *map(sqrt, of_all), decays=now.decays(one.weight))
            self._apply(flat, one, now, mean, rates)

    def _room(self, flat: Flat, one: LocalPiece) -> list[Buffer]:
        dtype = flat.weights().dtype
        count = self.widened or self.temporaries if dtype.is_half else self.temporaries
        return [flat.device.alloc((one.numel,), self.stored(dtype), Kind.TEMP) for _ in range(count)]

    def _add_up(self, flat: Flat, one: LocalPiece, scale: float, fresh: float, sums: Buffer, exact: Buffer) -> None:
        """Compute the sums of one tensor's slice. A tensor with a number for each weight needs no exchange, and updates
        its average."""
        grad, w, room = _part(flat.grad_shard, one), _part(flat.weights(), one), self._room(flat, one)
        device, squares = flat.device, room[0].array
        device.kernel(2 * one.numel, device.backend.sum_squares, w.array, one.numel, one_of(exact, one))
        work = self._work("squares", 2 * one.numel, grad.nbytes, squares.nbytes)
        device.kernels(work, device.backend.elementwise, Rule(square, self.tiny, scale), grad.array, squares)
        if one.is_matrix:
            by_row, by_column = _sums_of(sums, one)
            work = self._work("sums", 2 * one.numel, 2 * squares.nbytes, by_row.nbytes + by_column.nbytes)
            device.kernels(work, add_to, device.backend, one, squares, by_row.array, by_column.array)
        else:
            self._average(device, room[0], self._own(flat, one)[0], Average(fresh, 1.0))

    def _take_in(self, flat: Flat, one: LocalPiece, fresh: float, sums: Buffer, exact: Buffer) -> None:
        """Update R and C of each matrix of a tensor, and return the sums of R."""
        device, (rows, columns) = flat.device, one.matrix
        (by_row, by_column), (kept_rows, kept_columns) = _sums_of(sums, one), self._own(flat, one)
        self._average(device, by_row, kept_rows, Average(fresh, columns))
        self._average(device, by_column, kept_columns, Average(fresh, rows))
        sums_of_rows = exact[one.numbers].array
        work = work_of("sum_to", kept_rows.numel, (kept_rows.array, sums_of_rows))
        device.kernels([work], device.backend.sum_to, kept_rows.array.reshape(-1, rows), sums_of_rows.reshape(-1, 1))

    def _average(self, device: Device, sums: Buffer, kept: Buffer, now: Average) -> None:
        work = self._work("average", 3 * kept.numel, sums.nbytes + kept.nbytes, kept.nbytes)
        device.kernels(work, device.backend.elementwise, Rule(self.average, now, 1.0), sums.array, kept.array)

    def _update(self, flat: Flat, one: LocalPiece, scale: float, means: Sequence[float]) -> list[Buffer]:
        """Compute U of one tensor's slice, in the first of its temporaries."""
        device, grad, kept, room = flat.device, _part(flat.grad_shard, one), self._own(flat, one), self._room(flat, one)
        u, dtype = room[0], flat.weights().dtype
        if one.is_matrix:
            rows, columns = self.factors(device, kept, means)
            work = self._work("outer", one.numel, rows.nbytes + columns.nbytes, u.nbytes)
            device.kernels(work, outer, device.backend, one, rows.array, columns.array, u.array)
        else:
            device.kernel(0, device.backend.copy, kept[0].array, u.array)
        eps = {2: 2.0**-7, 4: 2.0**-23}.get(dtype.itemsize, 2.0**-52)
        work = self._work("update", 4 * one.numel, grad.nbytes + u.nbytes, u.nbytes)
        rules = [(cut, Rule(self.direction, Estimate(one.is_matrix, means[n], eps), scale)) for n, cut in one.cuts()]
        device.kernels(work, by_parts, device.backend, rules, grad.array, u.array)
        return room

    def _square_update(self, flat: Flat, one: LocalPiece, scale: float, means: Sequence[float], exact: Buffer) -> None:
        u = self._update(flat, one, scale, means)[0]
        flat.device.kernel(2 * one.numel, flat.device.backend.sum_squares, u.array, one.numel, one_of(exact, one))

    def _apply(self, flat: Flat, one: LocalPiece, now: Step, means: Sequence[float], rates: Any) -> None:
        device, w, room = flat.device, _part(flat.weights(), one), self._update(flat, one, now.grad_scale, means)
        moments = [_part(flat.states[name], one) for name in self.moments]
        storing = None if now.storing is None else now.storing(flat, Overlap(*one[:5]))
        moved = w.nbytes + sum(each.nbytes for each in moments)
        moved += 0 if storing is None or storing.compensation is None else w.nbytes
        work = self._work("move", 3 * one.numel, moved + room[0].nbytes, moved)
        arrays = [each.array for each in (room[0], w, *moments)]
        device.kernels(work, device.backend.elementwise, Rule(self.move, rates, 1.0), *arrays, storing=storing)

    def _own(self, flat: Flat, one: LocalPiece) -> list[Buffer]:
        """Return R and C of a matrix, or the single average of another tensor's slice."""
        return [flat.states[name][place] for name, place in one.places.items()]

    def _work(self, name: str, flops: int, read: int, written: int) -> list[KernelWork]:
        return [KernelWork(f"{type(self).__name__.lower()}_{name}", VECTOR, flops, read, written)]


# -- on arrays ----------------------------------------------------------------------------------------
def square(xp: Any, out: Array, x: Array, tiny: float) -> None:
    out[...] = x * x + tiny if tiny else x * x


def add_to(backend: Backend, one: LocalPiece, squares: Array, by_row: Array, by_column: Array) -> None:
    """Add the sums of a slice's squares to those of whole matrices' rows and columns, which start at 0."""
    for at, row in (each for of_one in rectangles(one) for each in enumerate(of_one)):
        values = row.of(squares)
        backend.sum_to(values, by_row[row.row : row.row + row.rows].reshape(row.rows, 1))
        columns = by_column[row.column : row.column + row.columns]
        if at:  # the dims after the first are one row each
            backend.add(columns, values.reshape(-1), columns)
        else:
            backend.sum_to(values, columns)


def outer(backend: Backend, one: LocalPiece, rows: Array, columns: Array, out: Array) -> None:
    """Return a slice's share of the product of a column of `rows` and a row of `columns`, matrix by matrix."""
    for row in chain.from_iterable(rectangles(one)):
        down = rows[row.row : row.row + row.rows].reshape(row.rows, 1)
        backend.multiply(down, columns[row.column : row.column + row.columns].reshape(1, row.columns), row.of(out))


def by_parts(backend: Backend, rules: Sequence[tuple[slice, Rule]], *arrays: Array) -> None:
    """Apply each rule to its part of the arrays."""
    for part, rule in rules:
        backend.elementwise(rule, *(array[part] for array in arrays))


def _zeros(device: Device, numel: int, dtype: DType) -> Buffer:
    buffer = device.alloc((numel,), dtype, Kind.TEMP)
    device.kernel(0, device.backend.fill, buffer.array, 0.0)
    return buffer


def _exchange(exact: Buffer, sums: Buffer, add: Add) -> Any:
    """Add up `sums` over ranks, and return the tensors' own sums, at the beginning, on the host."""
    device, own = exact.device, sums[: exact.numel]
    device.kernel(0, device.backend.copy, exact.array, own.array)
    add(sums)
    return device.backend.to_host(own.array)


def one_of(exact: Buffer, one: LocalPiece) -> Array:
    """Return one tensor's number among all: that of its first matrix."""
    return exact[one.number : one.number + 1].array


def _part(buffer: Buffer | None, one: LocalPiece) -> Buffer:
    assert buffer is not None
    return buffer[one.at : one.at + one.numel]


def _sums_of(sums: Buffer, one: LocalPiece) -> list[Buffer]:
    """Return a tensor's sums of rows, and of columns."""
    rows, columns = (matrices_of(one.weight) * each for each in one.matrix)
    return [sums[one.sums : one.sums + rows], sums[one.sums + rows : one.sums + rows + columns]]
