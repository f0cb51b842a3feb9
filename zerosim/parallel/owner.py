"""Whole units belong to ranks: the paper's wording, reduce to the owner and broadcast from it.

    bytes per rank     as zero1, zero2, zero3 on average; a rank's own share is that of its units
    volume per step    as zero1, zero2, zero3 in total, N 2 Psi (N-1)/N or N 3 Psi (N-1)/N elements;
                       an owner sends its units' parameters to every other rank (`direct`)

Units are dealt out greedily by size, the largest first. Nothing is padded. The sums are the same as
with slices, in the same order, so weights are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerosim.device import Buffer, Kind
from zerosim.parallel.base import Strategy
from zerosim.parallel.zero1 import Zero1
from zerosim.parallel.zero2 import Zero2
from zerosim.parallel.zero3 import Zero3
from zerosim.sharding import Flat, Slice, assign_owners, nothing, whole


class OwnerPartition(Strategy):
    """Who owns which flat, and the collectives that take the place of the sliced ones."""

    owners: dict[str, int]

    def place(self, flats: Sequence[Flat], write: Callable[[Flat], None]) -> None:
        owners = assign_owners([flat.numel for flat in flats], self.comm.size)
        self.owners = {flat.name: owner for flat, owner in zip(flats, owners, strict=True)}
        super().place(flats, write)

    def owns(self, flat: Flat) -> bool:
        return self.owners[flat.name] == self.comm.rank

    def owned(self, flat: Flat) -> Slice:
        return whole(flat.numel) if self.owns(flat) else nothing(flat.numel)

    def padded(self, flat: Flat) -> int:
        return flat.numel

    def broadcast(self, flat: Flat) -> None:
        self.comm.broadcast(flat.whole_param(), src=self.owners[flat.name])

    def reduce_to_owner(self, flat: Flat, grad: Buffer) -> Buffer | None:
        """The reduced gradient, in place on its owner, where it stays; None on the other ranks."""
        self.comm.reduce(grad, dst=self.owners[flat.name])
        if not self.owns(flat):
            return None
        self.device.retag(grad, Kind.GRAD)
        return grad


class OwnerZero1(OwnerPartition, Zero1):
    def reduce(self, flats: list[Flat]) -> None:
        for flat in flats:
            flat.grad_shard = self.reduce_to_owner(flat, flat.whole_grad())

    def spread(self, flat: Flat) -> None:
        self.broadcast(flat)


class OwnerZero2(OwnerPartition, Zero2):
    def reduce(self, flat: Flat, grad: Buffer) -> Buffer | None:
        return self.reduce_to_owner(flat, grad)

    def spread(self, flat: Flat) -> None:
        self.broadcast(flat)


class OwnerZero3(OwnerPartition, Zero3):
    def gather(self, flat: Flat) -> Buffer:
        """The owner uses its own copy; the others receive one for the time of use."""
        if self.owns(flat):
            full = self.shard(flat, Kind.UNSHARDED_PARAM)
        else:
            full = self.device.alloc((flat.numel,), flat.dtype, Kind.UNSHARDED_PARAM)
        self.comm.broadcast(full, src=self.owners[flat.name])
        return full

    def reduce(self, flat: Flat, grad: Buffer) -> Buffer | None:
        return self.reduce_to_owner(flat, grad)
