"""Whole units belong to ranks: the paper's wording, reduce to the owner and broadcast from it.

    bytes per rank     as zero1, zero2, zero3 on average; a rank's own share is that of its units
    volume per step    as zero1, zero2, zero3 in total, N 2 Psi (N-1)/N or N 3 Psi (N-1)/N elements;
                       an owner sends its units' parameters to every other rank (`direct`)

Units, or by leaf module tensors, are dealt out greedily by size, the largest first. Nothing is padded. The sums are the
same as with slices, in the same order, so weights are the same to the bit. An owner updates all that is its own before
the first broadcast: flat by flat the owners would wait for each other's updates, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zerosim.comm.group import Work
from zerosim.device.device import Buffer, Kind
from zerosim.parallel.base import Strategy
from zerosim.parallel.zero1 import Zero1
from zerosim.parallel.zero2 import Zero2
from zerosim.parallel.zero3 import Zero3
from zerosim.placement.partition import WholeUnits
from zerosim.tensor.flat import Flat


class OwnerPartition(Strategy):
    """The collectives that take the place of the sliced ones."""

    partition = WholeUnits()
    updates_first = True

    def owner(self, flat: Flat) -> int:
        """Where in the group the rank stands that owns a flat."""
        owner = self.layout.owner(flat.name)
        assert owner is not None
        return owner

    def owns(self, flat: Flat) -> bool:
        """Whether it is this rank."""
        return self.owner(flat) == self.comm.rank

    def broadcast(self, flat: Flat) -> None:
        """The owner's whole parameters to all ranks, over the old ones."""
        self.comm.broadcast(flat.whole_param(), src=self.owner(flat))

    def reduce_to_owner(self, flat: Flat, grad: Buffer) -> Buffer | None:
        """The reduced gradient, in place on its owner, where it stays; None on the other ranks."""
        return self.own_part(flat, self.comm.reduce(grad, dst=self.owner(flat)))

    def launch_reduce(self, flats: Sequence[Flat], grads: list[Buffer]) -> tuple[Work[Any], Callable[[Any], None]]:
        [flat], [grad] = flats, grads

        def keep(reduced: Buffer) -> None:
            with self.device.scope(unit=flat.module):
                self.keep_shard(flat, self.own_part(flat, reduced))

        return self.comm.launch_reduce(grad, dst=self.owner(flat)), keep

    def own_part(self, flat: Flat, reduced: Buffer) -> Buffer | None:
        """What this rank keeps of what a reduction left in its buffer."""
        if not self.owns(flat):
            return None
        self.device.retag(reduced, Kind.GRAD)
        return reduced


class OwnerZero1(OwnerPartition, Zero1):
    """ZeRO-1 with whole units per rank."""

    def reduce(self, flats: list[Flat]) -> None:
        for flat in flats:
            self.later(self.comm.launch_reduce(flat.whole_grad(), dst=self.owner(flat)), partial(self._keep, flat))
            if not self.overlaps:
                self.land()

    def _keep(self, flat: Flat, reduced: Buffer) -> None:
        flat.grad_shard = self.own_part(flat, reduced)

    def publish_params(self, flat: Flat) -> None:
        self.broadcast(flat)


class OwnerZero2(OwnerPartition, Zero2):
    """ZeRO-2 with whole units per rank."""

    def reduce(self, flat: Flat, grad: Buffer) -> Buffer | None:
        return self.reduce_to_owner(flat, grad)

    def publish_params(self, flat: Flat) -> None:
        self.broadcast(flat)


class OwnerZero3(OwnerPartition, Zero3):
    """ZeRO-3 with whole units per rank."""

    def gather(self, flat: Flat) -> Buffer:
        return self.comm.broadcast(self._copy(flat, Kind.UNSHARDED_PARAM), src=self.owner(flat))

    def launch_gather(self, flat: Flat) -> Work[Buffer]:
        return self.comm.launch_broadcast(self._copy(flat, Kind.PREFETCHED_PARAM), src=self.owner(flat))

    def _copy(self, flat: Flat, kind: Kind) -> Buffer:
        """The owner uses its own; the others receive one, a buffer of `kind`, for the time of use."""
        if self.owns(flat):
            return self.shard(flat, kind)
        return self.device.alloc((flat.numel,), flat.dtype, kind)

    def reduce(self, flat: Flat, grad: Buffer) -> Buffer | None:
        return self.reduce_to_owner(flat, grad)
