"""Expert parallelism: each of ep ranks has E/ep of a layer's experts, and rows travel to the experts that they chose.

(GShard, arXiv 2006.16668; over the axes of Parallel Folding, arXiv 2504.14960, as Megatron-LM d98e8a6,
core/transformer/moe/token_dispatcher.py, and torchtitan b5bcd76, distributed/expert_parallel.py.)

    counts      each rank says how many rows it has for each expert: E integers, for which the host waits
    send        an all-to-all of uneven parts: of a rank's M k rows of D the share (ep-1)/ep leaves it, if all experts
                are chosen equally often. Then rows are put in the order of their experts
    bring       back by the same way. In backward both run the other way: 4 all-to-alls a layer and microbatch
    etp         each expert's maps are cut over etp ranks, by columns, then by rows: all of them gather each other's
                rows, and reduce-scatter the results. Uneven ones are broadcasts and reductions, as c10d makes them

Experts' states are cut over edp, those ranks that have the same experts. An expert's gradient is the sum over the rows
of all its group's ranks, so it is multiplied by tp / (ep etp) when it is computed: then the average over edp divides
by dp_shard x cp, as every other gradient's does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

from zerosim.comm.collectives import Comm
from zerosim.config import RunConfig
from zerosim.device.device import Buffer, Kind
from zerosim.functional.common import Grads
from zerosim.functional.experts import Routing
from zerosim.nn.group import WholeExperts
from zerosim.parallel.pieces import Pieces, Place
from zerosim.parallel.tensor import PURPOSE
from zerosim.placement.mesh import EXPERT_CUTS, EXPERT_STATES
from zerosim.placement.split import Split
from zerosim.tensor.tensor import Tensor, apply


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add the ranks over which a layer's experts are cut."""
    mesh, groups = config.mesh.axes, place.groups
    if not mesh.is_folded:
        return made
    ep, etp = (mesh.index(place.rank, axis) if groups else 0 for axis in EXPERT_CUTS)
    comms = [groups(axis) if groups else None for axis in EXPERT_CUTS]
    scale = Fraction(mesh.tp, mesh.ep * mesh.etp)
    experts = ExpertParallel((mesh.ep, mesh.etp), (ep, etp), comms, scale)
    return made._replace(group=replace(made.group, experts=experts, mesh=mesh))


class ExpertParallel(WholeExperts):
    """Member (ep, etp) `at` of a group of `sizes`, with their `comms`. Without those it describes how weights are cut,
    and runs nothing. `scale`: the factor of an expert's gradient."""

    axes = EXPERT_CUTS

    def __init__(
        self, sizes: tuple[int, int], at: tuple[int, int], comms: Sequence[Comm | None], scale: Fraction
    ) -> None:
        (self.size, self.tensor), (self.index, _) = sizes, at
        self.comms, self.grad_scale = comms, scale

    def stack(self, shape: tuple[int, ...], *, of: int | None, **how: Any) -> dict[str, Any]:
        """Return how a stack (E, ...) of experts' weights is declared: its dim `of` is an expert's width F."""
        splits = [Split(shape, 0, self.size, axis="ep")]
        if of is not None:
            splits += [Split(splits[0].local_shape, of, self.tensor, axis="etp", **how)]
        return {"splits": tuple(splits), "axes": EXPERT_STATES}

    def num_local(self, experts: int) -> int:
        return experts // self.size

    def send(self, routing: Routing, *rows: Tensor) -> tuple[Trip, *tuple[Tensor, ...]]:
        trip = self._trip(routing)
        return trip, *[self._sent(one, trip) for one in rows]

    def bring(self, trip: Trip, rows: Tensor) -> Tensor:
        ep, etp = self.comms
        assert ep is not None
        assert etp is not None
        if trip.order:
            rows = moved(rows, *trip.back)
        if self.tensor > 1:
            out = scattered(etp, rows.buffer, trip.held, Kind.ACTIVATION)
            rows = apply(Scattered(etp, trip.held), out, rows, op="scatter_rows", saved={})
        if self.size > 1:
            out = exchanged(ep, rows.buffer, trip.received, trip.sent, Kind.ACTIVATION)
            rows = apply(Exchanged(ep, trip.received, trip.sent), out, rows, op="bring_rows", saved={})
        return rows

    def _sent(self, rows: Tensor, trip: Trip) -> Tensor:
        ep, etp = self.comms
        assert ep is not None
        assert etp is not None
        if self.size > 1:
            out = exchanged(ep, rows.buffer, trip.sent, trip.received, Kind.ACTIVATION)
            rows = apply(Exchanged(ep, trip.sent, trip.received), out, rows, op="send_rows", saved={})
        if self.tensor > 1:
            out = gathered(etp, rows.buffer, trip.held, Kind.ACTIVATION)
            rows = apply(Gathered(etp, trip.held), out, rows, op="gather_rows", saved={})
        return moved(rows, trip.chunks, trip.order) if trip.order else rows

    def _trip(self, routing: Routing) -> Trip:
        """Tell the group how many rows this rank has for each expert, and read what the others have."""
        own, local = routing.counts, self.num_local(len(routing.counts))
        table = self._tables(routing)  # by member of etp, then of ep: rows for each local expert
        chunks = [rows for of_member in table for rows in of_member]
        sources = range(0, len(chunks), local)
        order = [first + expert for expert in range(local) for first in sources] if local > 1 else []
        return Trip(
            counts=tuple(sum(chunks[expert::local]) for expert in range(local)),
            sent=tuple(sum(own[first : first + local]) for first in range(0, len(own), local)),
            received=tuple(sum(table[self.tensor_index][first : first + local]) for first in range(0, len(own), local)),
            held=tuple(map(sum, table)),
            chunks=tuple(chunks),
            order=tuple(order),
        )


@dataclass(frozen=True, slots=True)
class Trip:
    """How rows came to the experts of this rank.

    counts     the rows of each of its experts
    sent       the rows that it sent to each member of ep; `received` from each
    held       the rows that each member of etp received
    chunks     the rows of each expert from each source, as they arrived; `order`: in which they lie for the experts
    """

    counts: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    held: tuple[int, ...]
    chunks: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def back(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The chunks as they lie for the experts, and the order of their arrival."""
        place = {chunk: at for at, chunk in enumerate(self.order)}
        return tuple(self.chunks[chunk] for chunk in self.order), tuple(place[at] for at in range(len(self.order)))


@dataclass(frozen=True, slots=True)
class Exchanged:
    """An all-to-all of rows; backward is the other way. Saves nothing."""

    comm: Comm
    sent: tuple[int, ...]
    received: tuple[int, ...]

    def backward(self, grad: Buffer) -> Grads:
        return (exchanged(self.comm, grad, self.received, self.sent, Kind.ACTIVATION_GRAD),)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Every member's rows; backward adds up their gradients. Saves nothing."""

    comm: Comm
    held: tuple[int, ...]

    def backward(self, grad: Buffer) -> Grads:
        return (scattered(self.comm, grad, self.held, Kind.ACTIVATION_GRAD),)


@dataclass(frozen=True, slots=True)
class Scattered:
    """The sum of every member's results for the own rows; backward gathers the gradients. Saves nothing."""

    comm: Comm
    held: tuple[int, ...]

    def backward(self, grad: Buffer) -> Grads:
        return (gathered(self.comm, grad, self.held, Kind.ACTIVATION_GRAD),)


@dataclass(frozen=True, slots=True)
class Moved:
    """Chunks of rows in another order; backward moves them back. Saves nothing."""

    chunks: tuple[int, ...]
    order: tuple[int, ...]

    def backward(self, grad: Buffer) -> Grads:
        return (_moved(grad, self.chunks, self.order, Kind.ACTIVATION_GRAD),)


def moved(rows: Tensor, chunks: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Return the chunks of rows, of so many each, in this order."""
    place = {chunk: at for at, chunk in enumerate(order)}
    back = Moved(tuple(chunks[chunk] for chunk in order), tuple(place[at] for at in range(len(order))))
    return apply(back, _moved(rows.buffer, chunks, order, Kind.ACTIVATION), rows, op="move_rows", saved={})


def _moved(rows: Buffer, chunks: Sequence[int], order: Sequence[int], kind: Kind) -> Buffer:
    out = rows.device.alloc(rows.shape, rows.dtype, kind)
    rows.device.kernel(0, rows.device.backend.move_rows, rows.array, chunks, order, out.array)
    return out


def exchanged(comm: Comm, rows: Buffer, sent: Sequence[int], received: Sequence[int], kind: Kind) -> Buffer:
    """Send so many of the rows to each member, in their order, and return those of all members."""
    wide = rows.shape[1]
    out = rows.device.alloc((sum(received), wide), rows.dtype, kind)
    splits = [[wide * numel for numel in numels] for numels in (sent, received)]
    comm.all_to_all(
        rows.reshape(-1),
        out=out.reshape(-1),
        purpose=PURPOSE,
        input_split_sizes=splits[0],
        output_split_sizes=splits[1],
    )
    return out


def gathered(comm: Comm, rows: Buffer, held: Sequence[int], kind: Kind) -> Buffer:
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


def scattered(comm: Comm, rows: Buffer, held: Sequence[int], kind: Kind) -> Buffer:
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
