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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zerosim import functional as F
from zerosim.comm.collectives import Comm
from zerosim.config import RunConfig
from zerosim.config.parts.experts import rows_by_rank
from zerosim.device.device import Buffer, Kind
from zerosim.functional.router import Chosen, Routing, read_counts, sort_rows
from zerosim.nn.group import RunsBeside, Weigh, WholeExperts, WholeMaps
from zerosim.parallel.experts_rows import back_again, exchanged, gathered, moved, scattered
from zerosim.parallel.pieces import Pieces, Place
from zerosim.parallel.tensor import PURPOSE
from zerosim.placement.classes import Column, Reason
from zerosim.placement.layout import Layout
from zerosim.placement.mesh import EXPERT_CUTS, EXPERT_STATES
from zerosim.placement.split import Split
from zerosim.tensor.tensor import Tensor

CONTROL = "control"


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add the ranks over which a layer's experts are cut."""
    mesh, groups = made.group.device_mesh, place.groups
    if not mesh.is_folded:
        return made
    kind = AllGathered if config.experts.dispatcher == "allgather" else Exchanging
    comm = None if groups is None else Members(groups("ep"), groups("etp"), groups(*EXPERT_CUTS))
    experts = kind((mesh.ep, mesh.etp), mesh.index(place.rank, *EXPERT_CUTS), comm, mesh.tp / (mesh.ep * mesh.etp))
    experts.overlaps = config.experts.shared_expert_overlap
    return made._replace(group=replace(made.group, experts=experts))


def unlike(config: RunConfig) -> list[Reason]:
    """Return why ranks along ep differ, if they do: their experts get more rows than others, or fewer."""
    rows = rows_by_rank(config.mesh, config.model, config.experts, config.data)
    if not rows:
        return []

    def places(layout: Layout, stage: int) -> Iterator[Column]:
        yield ("ep",), list(zip(*rows, strict=True))

    return [places]


class Members(NamedTuple):
    """This rank's groups along ep, along etp, and along both."""

    ep: Comm
    etp: Comm
    both: Comm


class Cut(WholeExperts):
    """Member `at` of a group of ep x etp `sizes`. Without its members it describes how weights are cut, and runs
    nothing. `grad_scale`: the factor of an expert's gradient."""

    axes = EXPERT_CUTS

    def __init__(self, sizes: tuple[int, int], at: int, members: Members | None, grad_scale: float) -> None:
        self.size, self.tensor = sizes
        self.index, self.tensor_index = divmod(at, self.tensor)
        self._members, self.grad_scale = members, grad_scale

    @property
    def members(self) -> Members:
        assert self._members is not None, "a model that was built for its layout alone does not run"
        return self._members

    def stack(self, maps: WholeMaps, shape: tuple[int, ...], *, of: int, parts: int = 1) -> dict[str, Any]:
        by_expert = Split(shape, 0, self.size, axis="ep")
        by_width = Split(by_expert.local_shape, of, self.tensor, parts, axis="etp")
        return {"splits": (by_expert, by_width), "axes": EXPERT_STATES}

    def adapters(self, shape: tuple[int, ...], dim: int, parts: int) -> dict[str, Any]:
        return {"splits": (Split(shape, dim, self.size, parts, axis="ep"),), "axes": EXPERT_STATES}

    def width_of(self, maps: WholeMaps) -> tuple[int, int]:
        return self.tensor, self.tensor_index

    def num_local(self, experts: int) -> int:
        return experts // self.size


class Exchanging(Cut):
    """Rows go to their experts' ranks by all-to-all, and come back."""

    def dispatch(
        self, x: Tensor, weights: Tensor, chosen: Chosen, *, inside: bool, beside: RunsBeside | None = None
    ) -> tuple[Trip, Tensor, Tensor]:
        trip = self._trip(chosen)
        rows = self._sent(F.dispatch(x, trip.home), trip, beside, alone=not inside)
        of_rows = F.row_weights(weights, trip.home)
        return trip, rows, self._sent(of_rows, trip) if inside else of_rows

    def combine(
        self, way: Trip, rows: Tensor, weigh: Weigh | None, shape: tuple[int, ...], beside: RunsBeside | None = None
    ) -> Tensor:
        members = self.members
        if way.order:
            rows = moved(rows, *back_again(way.chunks, way.order))
        if self.tensor > 1:
            rows = scattered(members.etp, rows, way.held)
        if self.size > 1:
            rows = exchanged(members.ep, rows, way.received, way.sent, beside)
        return super().combine(way.home, rows, weigh, shape)

    def _sent(self, rows: Tensor, trip: Trip, beside: RunsBeside | None = None, *, alone: bool = True) -> Tensor:
        if self.size > 1:
            rows = exchanged(self.members.ep, rows, trip.sent, trip.received, beside, alone=alone)
        if self.tensor > 1:
            rows = gathered(self.members.etp, rows, trip.held)
        return moved(rows, trip.chunks, trip.order) if trip.order else rows

    def _table(self, chosen: Chosen) -> Buffer:
        """Return the rows for each expert on the device: with a capacity, those that it lets in."""
        if chosen.known is None:
            return chosen.table
        table = chosen.table.device.alloc(chosen.table.shape, chosen.table.dtype, Kind.TEMP)
        table.device.backend.from_host(chosen.known[0], table.array)
        return table

    def _trip(self, chosen: Chosen) -> Trip:
        """Tell the group how many rows this rank has for each expert, and read what the others have for the experts
        here."""
        experts, members, each = chosen.table.numel, self.members, range(self.size)
        local = self.num_local(experts)
        arrived = table = self._table(chosen)
        if self.size > 1:
            arrived = members.ep.all_to_all(arrived, kind=Kind.TEMP, purpose=CONTROL)
        if self.tensor > 1:
            arrived = members.etp.all_gather(arrived, kind=Kind.TEMP, purpose=CONTROL)
        own = chosen.assumed() if chosen.known is None else chosen.known[0]
        here = own[self.index * local : (self.index + 1) * local] * (self.size * self.tensor)
        own, chunks = read_counts([table, arrived], None if chosen.spread is None else [own, here])
        sources = range(0, len(chunks), local)
        of_member = [chunks[first : first + experts] for first in range(0, len(chunks), experts)]
        return Trip(
            home=chosen.of_counts(own, chosen.known and chosen.known[1]),
            counts=tuple(sum(chunks[expert::local]) for expert in range(local)),
            sent=tuple(sum(own[at * local : (at + 1) * local]) for at in each),
            received=tuple(sum(of_member[self.tensor_index][at * local : (at + 1) * local]) for at in each),
            held=tuple(map(sum, of_member)),
            chunks=chunks,
            order=tuple(first + expert for expert in range(local) for first in sources) if local > 1 else (),
        )


@dataclass(frozen=True, slots=True)
class Trip:
    """How rows came to the experts of this rank.

    home       the rows of its own tokens
    counts     the rows of each of its experts
    sent       the rows that it sent to each member of ep; `received` from each
    held       the rows that each member of etp received
    chunks     the rows of each expert from each source, as they arrived; `order`: in which they lie for the experts
    """

    home: Routing
    counts: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    held: tuple[int, ...]
    chunks: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def chosen(self) -> tuple[int, ...]:
        """How many tokens here chose each expert."""
        return self.home.chosen

    @property
    def dropped(self) -> int:
        """The choices beyond their experts' capacity."""
        return self.home.dropped


class AllGathered(Cut):
    """Every rank gathers all tokens of the group, takes the rows of its own experts, and reduce-scatters the sums."""

    def dispatch(
        self, x: Tensor, weights: Tensor, chosen: Chosen, *, inside: bool, beside: RunsBeside | None = None
    ) -> tuple[Routing, Tensor, Tensor]:
        comm, (tokens, top_k), experts = self.members.both, chosen.ids.shape, chosen.table.numel
        wide = x.shape[-1]
        x, weights = (gathered(comm, one, (tokens,) * comm.size) for one in (x.reshape(tokens, wide), weights))
        ids = comm.all_gather(chosen.ids.reshape(-1), kind=Kind.ACTIVATION, purpose=PURPOSE).reshape(-1, top_k)
        found = sort_rows(ids, experts, chosen.spread)
        own = chosen.assumed()
        assumed = [own, tuple(comm.size * numel for numel in own)]
        of_tokens, counts = read_counts([chosen.table, found.table], None if chosen.spread is None else assumed)
        local = self.num_local(experts)
        first = self.index * local
        start, own = sum(counts[:first]), counts[first : first + local]
        way = Routing(ids, found.order[start : start + sum(own)], top_k, own, of_tokens)
        return way, F.dispatch(x, way), F.row_weights(weights, way)

    def combine(
        self, way: Routing, rows: Tensor, weigh: Weigh | None, shape: tuple[int, ...], beside: RunsBeside | None = None
    ) -> Tensor:
        comm = self.members.both
        sums = super().combine(way, rows, weigh, (way.ids.shape[0], shape[-1]))
        return scattered(comm, sums, (sums.shape[0] // comm.size,) * comm.size).reshape(*shape)
