"""Exchanges: the collectives that turn whole gradients into local shards, and local shards into whole parameters.

    Slices      reduce_scatter, all_gather    every rank owns a slice of each flat          2 or 3 Psi (N-1)/N
    KeepSlice   all_reduce, all_gather        the same, but every rank receives all of the sum and keeps its slice:
                                              Psi (N-1)/N more (DeepSpeed's stages 1 and 2, by default)
    Owners      reduce, broadcast             the paper's wording: a rank owns whole flats, dealt out by size; nothing
                                              is padded, and an owner sends its own to every other rank
    AllReduce   all_reduce                    stage 0: every rank owns everything

All add the same gradients in the same order, so weights are bit-identical. An exchange knows flats and groups; a
`Reducer` and `Gathered` decide when to exchange. Source of KeepSlice: DeepSpeed, stage_1_and_2.py
(use_multi_rank_bucket_allreduce).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from zerosim.comm.collectives import Comm
from zerosim.comm.group import Work
from zerosim.comm.groups import Groups
from zerosim.device.device import Buffer, Kind
from zerosim.device.events import COMPUTE
from zerosim.dtypes import DType
from zerosim.parallel.gathers import AllGather, Arriving
from zerosim.parallel.shards import HERE, Shards
from zerosim.placement.partition import EvenSlices, Partition, Whole, WholeUnits
from zerosim.placement.rows import Row
from zerosim.tensor.flat import Flat, in_turn


class Slices:
    """reduce_scatter and all_gather. `gathers`: how parameters are gathered (`gathers.py`)."""

    partition: ClassVar[Partition] = EvenSlices()
    states: Mapping[str, Row] = MappingProxyType({})  # what it stores for each trained flat beside the model states
    keeps: Mapping[str, str] = MappingProxyType({})  # of `states`: each "rank"'s own, a "slice" of one, or "packed"
    kept: Mapping[tuple[str, str], Buffer] = MappingProxyType({})  # `states` by state and flat
    joins = True  # several flats share one call
    sent_dtype: ClassVar[DType | None] = None  # of gradients that are sent as backward computes them

    def __init__(self, gathers: AllGather | None = None) -> None:
        self.gathers = gathers or AllGather()

    def join(self, groups: Groups, shards: Shards = HERE) -> None:
        """Join the ranks."""
        self.groups, self.shards = groups, shards
        self.gathers.join(groups)

    def group_of(self, flat: Flat) -> Comm:
        """Return the ranks that a flat is cut over."""
        return self.groups(*flat.held.axes)

    def calls(self, flats: Sequence[Flat]) -> list[list[Flat]]:
        """Group these flats by the call that reduces them."""
        if not self.joins:
            return [[flat] for flat in flats]
        together: dict[Comm, list[Flat]] = {}
        for flat in flats:
            together.setdefault(self.group_of(flat), []).append(flat)
        return [*together.values()]

    def place(self, flat: Flat, state: str) -> None:
        """Allocate one of `states` for a flat whose rows name it."""

    # -- gradients: of each flat's reduced gradient this rank keeps its shard --------------------------------------
    def launch_reduce(self, flats: Sequence[Flat], grads: list[Buffer]) -> Work[Any]:
        """Reduce whole gradients in one call."""
        shards = []
        for flat in flats:
            with flat.device.scope(unit=flat.spec.module):
                shards.append(flat.new_grad_shard())
        return self.group_of(flats[0]).launch_reduce_scatter(grads, out=shards)

    def own_part(self, flat: Flat, reduced: Any) -> Buffer | None:
        """Return the local shard of the reduced gradient (None: nothing)."""
        own: Buffer = reduced
        return own

    def launch_in_place(self, flats: Sequence[Flat], grads: list[Buffer]) -> Work[Any]:
        """Reduce each local shard in place, where gradients are stored whole."""
        own = [flat.own_window(grad) for flat, grad in zip(flats, grads, strict=True)]
        return self.group_of(flats[0]).launch_reduce_scatter(grads, out=own)

    def own_window(self, flat: Flat, grad: Buffer, reduced: Any) -> Buffer | None:
        """Return where in the whole gradient the local shard lies, now that `reduced` has arrived (None: nowhere)."""
        return flat.own_window(grad)

    # -- parameters -------------------------------------------------------------------------------------------------
    def gather(self, flat: Flat, *, exactly: bool = False) -> Buffer:
        """Gather the whole parameters, padding included, into a new buffer; `exactly`: by one all_gather of their
        values."""
        gathers = AllGather() if exactly else self.gathers
        if gathers.in_place and self.shards.parameters.is_away(flat):
            return self._launch_in_place(flat, Kind.UNSHARDED_PARAM, COMPUTE).wait()
        return gathers.gather(flat, self.group_of(flat), self.shards.parameters.param(flat, Kind.COMM))

    def launch_gather(self, flat: Flat) -> Arriving:
        """Launch the same gather. A slice that needs a cast is cast into its final place, so that no second buffer
        waits with it."""
        parameters = self.shards.parameters
        if self.gathers.in_place and (flat.param_shard is None or parameters.is_away(flat)):
            return self._launch_in_place(flat, Kind.PREFETCHED_PARAM, self.group_of(flat).axis)
        return self.gathers.launch(flat, self.group_of(flat), parameters.param(flat, Kind.COMM))

    def _launch_in_place(self, flat: Flat, kind: Kind, by: str) -> Work[Buffer]:
        """Bring the local slice to its place in a new whole buffer, and gather the others around it. Compute or a
        stream waits for the copy."""
        full = flat.device.alloc((flat.held.padded_numel,), flat.dtype, kind)
        own = flat.own_window(full)
        self.shards.parameters.bring(flat, own, by)
        return self.group_of(flat).launch_all_gather(own, out=full)

    def launch_publish(self, flat: Flat) -> Work[Buffer]:
        """Launch the exchange that writes all ranks' new parameters over the old ones."""
        return self.group_of(flat).launch_all_gather(flat.shard(), out=flat.whole_param())

    def publish(self, flat: Flat) -> None:
        """Exchange new parameters now. Through a bucket they arrive piece by piece and are copied to their places: the
        cost of a list of tensors (DeepSpeed edaa722, all_gather_dp_groups with allgather_bucket_size, where there is no
        all_gather_into_tensor)."""
        comm, shard, whole = self.group_of(flat), flat.shard(), flat.whole_param()
        if not self.gathers.bucket or comm.size == 1:
            self.launch_publish(flat).wait()
            return
        most = max(1, self.gathers.bucket // comm.size)
        for start in range(0, shard.numel, most):
            piece = shard[start : start + most]
            arrived = comm.all_gather(piece, kind=Kind.COMM)
            for rank in range(comm.size):
                part, at = arrived[rank * piece.numel : (rank + 1) * piece.numel], rank * shard.numel + start
                flat.device.kernel(0, flat.device.backend.copy, part.array, whole[at : at + piece.numel].array)


class KeepSlice(Slices):
    """Reduce by all_reduce, and copy out the local slice."""

    def launch_reduce(self, flats: Sequence[Flat], grads: list[Buffer]) -> Work[Any]:
        return self.group_of(flats[0]).launch_all_reduce(grads)

    def own_part(self, flat: Flat, reduced: Any) -> Buffer | None:
        shard = flat.new_grad_shard()
        flat.device.kernel(0, flat.device.backend.copy, flat.own_window(reduced).array, shard.array)
        return shard

    launch_in_place = launch_reduce


class AllReduce(KeepSlice):
    """Stage 0: the local shard is the whole flat."""

    partition = Whole()


class Owners(Slices):
    """reduce to the owner, broadcast from it."""

    partition = WholeUnits()
    joins = False

    def owns(self, flat: Flat) -> bool:
        flat.device.turn(flat.name)
        return flat.held.owner == self.group_of(flat).rank

    def launch_reduce(self, flats: Sequence[Flat], grads: list[Buffer]) -> Work[Any]:
        [flat] = in_turn(flats)
        return self.group_of(flat).launch_reduce(grads.pop(), dst=flat.held.owner)

    launch_in_place = launch_reduce

    def own_part(self, flat: Flat, reduced: Any) -> Buffer | None:
        if not self.owns(flat):
            return None
        own: Buffer = reduced
        flat.device.retag(own, Kind.GRAD)
        return own

    def own_window(self, flat: Flat, grad: Buffer, reduced: Any) -> Buffer | None:
        return self.own_part(flat, reduced)

    def gather(self, flat: Flat, *, exactly: bool = False) -> Buffer:
        return self.group_of(flat).broadcast(self._place_for(flat, Kind.UNSHARDED_PARAM), src=flat.held.owner)

    def launch_gather(self, flat: Flat) -> Arriving:
        place = self._place_for(flat, Kind.PREFETCHED_PARAM)
        return self.group_of(flat).launch_broadcast(place, src=flat.held.owner)

    def _place_for(self, flat: Flat, kind: Kind) -> Buffer:
        """Return a place for a flat: the owner's own buffer, and on other ranks a buffer of `kind` for the time of
        use."""
        if self.owns(flat):
            return self.shards.parameters.param(flat, kind)
        return flat.device.alloc((flat.numel,), flat.dtype, kind)

    def launch_publish(self, flat: Flat) -> Work[Buffer]:
        flat.device.turn(flat.name)
        return self.group_of(flat).launch_broadcast(flat.whole_param(), src=flat.held.owner)
