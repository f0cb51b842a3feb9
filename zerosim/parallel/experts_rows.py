"""Rows on their way to experts: exchanged, gathered, scattered and put in order, each with its backward.

None of them saves a buffer. Numbers of rows are ints on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zerosim.comm.collectives import Comm
from zerosim.comm.group import Work
from zerosim.device.device import Buffer, Kind
from zerosim.functional.common import Grads
from zerosim.parallel.tensor import PURPOSE
from zerosim.tensor.order import visit_before, visit_with
from zerosim.tensor.tensor import Tensor, apply


@dataclass(frozen=True, slots=True)
class Exchanged:
    """An all-to-all of rows; backward is the other way. Saves nothing."""

    comm: Comm
    sent: tuple[int, ...]
    received: tuple[int, ...]

    def backward(self, grad: Buffer) -> Grads:
        out, work = _launched(self.comm, grad, self.received, self.sent, Kind.ACTIVATION_GRAD)
        work.wait()
        return (out,)


@dataclass(frozen=True, slots=True)
class Arrived:
    """The end of an all-to-all beside something else. Backward begins the other way, whose work goes `back`. Saves
    nothing."""

    comm: Comm
    sent: tuple[int, ...]
    received: tuple[int, ...]
    back: list[Work[Buffer]]

    def backward(self, grad: Buffer) -> Grads:
        out, work = _launched(self.comm, grad, self.received, self.sent, Kind.ACTIVATION_GRAD)
        self.back.append(work)
        return (out,)


@dataclass(frozen=True, slots=True)
class Sent:
    """The beginning of such an all-to-all. Backward waits for the other way."""

    back: list[Work[Buffer]]

    def backward(self, grad: Buffer) -> Grads:
        self.back.pop().wait()
        return (grad,)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Every member's rows; backward adds up their gradients. Saves nothing."""

    comm: Comm
    held: tuple[int, ...]

    def backward(self, grad: Buffer) -> Grads:
        return (_scattered(self.comm, grad, self.held, Kind.ACTIVATION_GRAD),)


@dataclass(frozen=True, slots=True)
class Scattered:
    """The sum of every member's results for the own rows; backward gathers the gradients. Saves nothing."""

    comm: Comm
    held: tuple[int, ...]

    def backward(self, grad: Buffer) -> Grads:
        return (_gathered(self.comm, grad, self.held, Kind.ACTIVATION_GRAD),)


@dataclass(frozen=True, slots=True)
class Moved:
    """Chunks of rows in another order; backward moves them back. Saves nothing."""

    chunks: tuple[int, ...]
    order: tuple[int, ...]

    def backward(self, grad: Buffer) -> Grads:
        return (_moved(grad, self.chunks, self.order, Kind.ACTIVATION_GRAD),)


def moved(rows: Tensor, chunks: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Return the chunks of rows, of so many each, in this order."""
    back = Moved(*back_again(chunks, order))
    return apply(back, _moved(rows.buffer, chunks, order, Kind.ACTIVATION), rows, op="move_rows", saved={})


def back_again(chunks: tuple[int, ...], order: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the chunks as they lie in this order, and the order that brings them back."""
    place = {chunk: at for at, chunk in enumerate(order)}
    return tuple(chunks[chunk] for chunk in order), tuple(place[at] for at in range(len(order)))


def exchanged(
    comm: Comm,
    rows: Tensor,
    sent: tuple[int, ...],
    received: tuple[int, ...],
    beside: Callable[[Tensor], Tensor] | None = None,
    *,
    alone: bool = True,
) -> Tensor:
    """Send so many of the rows to each member, in their order, and return those of all members. `beside` runs while
    they are on their way, and its backward while their gradients are. `alone`: their weights stay at home."""
    out, work = _launched(comm, rows.buffer, sent, received, Kind.ACTIVATION)
    if beside is None:
        work.wait()
        return apply(Exchanged(comm, sent, received), out, rows, op="exchange_rows", saved={})
    back = list[Work[Buffer]]()
    leaving = apply(Sent(back), out, rows, op="exchange_rows", saved={})
    if alone:  # then gradients of what the router and both kinds of experts read add up as without `beside`
        visit_with(leaving, rows)
    other = beside(leaving)
    work.wait()
    arrived = apply(Arrived(comm, sent, received, back), out, leaving, op="exchange_rows", saved={})
    visit_before(arrived, other)
    return arrived


def gathered(comm: Comm, rows: Tensor, held: tuple[int, ...]) -> Tensor:
    """Return every member's rows, of which it has so many."""
    out = _gathered(comm, rows.buffer, held, Kind.ACTIVATION)
    return apply(Gathered(comm, held), out, rows, op="gather_rows", saved={})


def scattered(comm: Comm, rows: Tensor, held: tuple[int, ...]) -> Tensor:
    """Return the sum of all members' results for this member's rows. `rows` may be overwritten."""
    out = _scattered(comm, rows.buffer, held, Kind.ACTIVATION)
    return apply(Scattered(comm, held), out, rows, op="scatter_rows", saved={})


def _moved(rows: Buffer, chunks: Sequence[int], order: Sequence[int], kind: Kind) -> Buffer:
    out = rows.device.alloc(rows.shape, rows.dtype, kind)
    rows.device.kernel(0, rows.device.backend.move_rows, rows.array, chunks, order, out.array)
    return out


def _launched(
    comm: Comm, rows: Buffer, sent: Sequence[int], received: Sequence[int], kind: Kind
) -> tuple[Buffer, Work[Buffer]]:
    """Begin to send so many of the rows to each member, in their order, and return the place of all members' rows."""
    wide = rows.shape[1]
    out = rows.device.alloc((sum(received), wide), rows.dtype, kind)
    splits = [[wide * numel for numel in numels] for numels in (sent, received)]
    work = comm.launch_all_to_all(
        rows.reshape(-1),
        out=out.reshape(-1),
        purpose=PURPOSE,
        input_split_sizes=splits[0],
        output_split_sizes=splits[1],
    )
    return out, work


def _gathered(comm: Comm, rows: Buffer, held: Sequence[int], kind: Kind) -> Buffer:
    """Return every member's rows, of which it has so many."""
    out = rows.device.alloc((sum(held), rows.shape[1]), rows.dtype, kind)
    if len({*held}) == 1:
        comm.all_gather(rows.reshape(-1), out=out.reshape(-1), purpose=PURPOSE)
        return out
    parts = _parts(out, held)
    rows.device.kernel(0, rows.device.backend.copy, rows.array, parts[comm.rank].array)
    works = [comm.launch_broadcast(part, src, PURPOSE) for src, part in enumerate(parts) if part.numel]
    for work in works:
        work.wait()
    return out


def _scattered(comm: Comm, rows: Buffer, held: Sequence[int], kind: Kind) -> Buffer:
    """Return the sum of all members' results for this member's rows. `rows` may be overwritten."""
    out = rows.device.alloc((held[comm.rank], rows.shape[1]), rows.dtype, kind)
    if len({*held}) == 1:
        comm.reduce_scatter(rows.reshape(-1), out=out.reshape(-1), op="sum", purpose=PURPOSE)
        return out
    parts = _parts(rows, held)
    works = [comm.launch_reduce(part, dst, "sum", PURPOSE) for dst, part in enumerate(parts) if part.numel]
    for work in works:
        work.wait()
    rows.device.kernel(0, rows.device.backend.copy, parts[comm.rank].array, out.array)
    return out


def _parts(rows: Buffer, held: Sequence[int]) -> list[Buffer]:
    """Return each member's rows, as windows."""
    return [rows[stop - numel : stop] for stop, numel in zip(accumulate(held), held, strict=True)]
