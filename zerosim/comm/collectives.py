"""Collectives as a rank's program calls them: c10d's verbs on Buffers.

Owns which verbs there are, what they are given and return, and buckets. How a call is made of rounds
is `direct.py`'s and `ring.py`'s affair, how it is recorded `group.py`'s, how a round runs
`threads.py`'s, what is refused `checks.py`'s.

Every verb waits, unless told `wait=False`: then it returns a `Work`, and until that is waited for
its inputs must not be written nor its outputs read. One buffer or, where the signature says so,
several in one call. `src` and `dst` are indices in the group.

Legend: N group size, c elements of a rank's slice, L elements of a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from zerosim.comm import checks
from zerosim.comm.group import Buffers, Group, Work
from zerosim.comm.plan import Plan, RangeCut, SliceCut, buckets, window
from zerosim.comm.transport import Call, Hop
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType
from zerosim.errors import InputError

SENDER, RECEIVER = 0, 1
"""Members of the pair that a message makes."""


class Comm(Group):
    """One rank's membership in a group, with the verbs. `rank` is its index in the group, `ranks` are global."""

    def subgroup(self, ranks: Sequence[int], axis: str | None = None, number: int = 0) -> Comm:
        """The group of these global ranks, this one among them. Needs no communication.

        Native collectives of MPI want another `number`, the same on all members, for each group that shares members
        with this one.
        """
        outside = sorted(set(ranks).difference(self.ranks))
        if outside:
            raise InputError(f"rank {self.device.rank}: ranks {outside} are not in the group {self.ranks}")
        members = sorted(set(ranks))
        group = Comm(
            self.device, self._transport, members, axis or self.axis, self.algorithm, self.bucket_bytes, number
        )
        group._sequences = self._sequences
        return group

    @overload
    def all_reduce(self, buffer: Buffers, op: str = ..., purpose: str = ..., wait: Literal[True] = ...) -> Buffers: ...
    @overload
    def all_reduce(
        self, buffer: Buffers, op: str = ..., purpose: str = ..., *, wait: Literal[False]
    ) -> Work[Buffers]: ...
    def all_reduce(
        self, buffer: Buffer | list[Buffer], op: str = "avg", purpose: str = "states", wait: bool = True
    ) -> Any:
        """Every rank's buffers become their reduction, in place. Any shapes."""
        buffers, call = self._open("all_reduce", buffer, op)
        arrays = [checks.flat(self.device, "all_reduce", b) for b in buffers]
        lengths = [b.numel for b in buffers]
        work = Work(self.device, buffer, buffers)
        me = self._member(work, buffers[0].dtype)
        for lo, hi in buckets(sum(lengths), self._even_limit(me.itemsize)):
            plan = self._algorithm.all_reduce(me, arrays, RangeCut(lengths, self.size, lo, hi), op)
            self._launch(work, call, plan, (hi - lo) * me.itemsize, purpose)
        return work.wait() if wait else work

    @overload
    def reduce_scatter(
        self,
        full: Buffers,
        out: Buffers | None = ...,
        kind: Kind = ...,
        op: str = ...,
        purpose: str = ...,
        wait: Literal[True] = ...,
    ) -> Buffers: ...
    @overload
    def reduce_scatter(
        self,
        full: Buffers,
        out: Buffers | None = ...,
        kind: Kind = ...,
        op: str = ...,
        purpose: str = ...,
        *,
        wait: Literal[False],
    ) -> Work[Buffers]: ...
    def reduce_scatter(
        self,
        full: Buffer | list[Buffer],
        out: Buffer | list[Buffer] | None = None,
        kind: Kind = Kind.GRAD,
        op: str = "avg",
        purpose: str = "states",
        wait: bool = True,
    ) -> Any:
        """out (c) = this rank's slice of the reduction of every rank's full (N*c).

        Without `out` a buffer of `kind` is allocated. `out` may be the window of `full`'s own slice.
        """
        name = "reduce_scatter"
        fulls, call = self._open(name, full, op)
        lengths = [checks.slice_numel(self.device, name, b, self.size) for b in fulls]
        dtype = fulls[0].dtype
        outs = self._outputs(name, out, lengths, dtype, kind)
        for part, whole in zip(outs, fulls, strict=True):
            checks.in_place(self.device, name, part, whole, self.rank)
        work = Work(self.device, outs if isinstance(full, list) else outs[0], fulls)
        me = self._member(work, dtype)
        arrays, out_arrays = [b.array for b in fulls], [b.array for b in outs]
        for lo, hi in buckets(sum(lengths), self._limit(me.itemsize, self.size)):
            cut = SliceCut(lengths, self.size, lo, hi)
            plan = self._algorithm.reduce_scatter(me, arrays, window(out_arrays, lo, hi), cut, op)
            self._launch(work, call, plan, (hi - lo) * self.size * me.itemsize, purpose)
        return work.wait() if wait else work

    @overload
    def all_gather(
        self,
        shard: Buffers,
        out: Buffers | None = ...,
        kind: Kind = ...,
        purpose: str = ...,
        wait: Literal[True] = ...,
    ) -> Buffers: ...
    @overload
    def all_gather(
        self,
        shard: Buffers,
        out: Buffers | None = ...,
        kind: Kind = ...,
        purpose: str = ...,
        *,
        wait: Literal[False],
    ) -> Work[Buffers]: ...
    def all_gather(
        self,
        shard: Buffer | list[Buffer],
        out: Buffer | list[Buffer] | None = None,
        kind: Kind = Kind.UNSHARDED_PARAM,
        purpose: str = "states",
        wait: bool = True,
    ) -> Any:
        """out (N*c) = every rank's shard (c), in rank order.

        Without `out` a buffer of `kind` is allocated. `shard` may be the window of `out`'s own slice.
        """
        name = "all_gather"
        shards, call = self._open(name, shard)
        for b in shards:
            checks.shape(self.device, name, "shard", b, (b.numel,))
        lengths, dtype = [b.numel for b in shards], shards[0].dtype
        outs = self._outputs(name, out, [self.size * c for c in lengths], dtype, kind)
        in_place = [
            checks.in_place(self.device, name, part, whole, self.rank) for part, whole in zip(shards, outs, strict=True)
        ]
        work = Work(self.device, outs if isinstance(shard, list) else outs[0], shards)
        me = self._member(work, dtype)
        arrays, out_arrays = [b.array for b in shards], [b.array for b in outs]
        for lo, hi in buckets(sum(lengths), self._limit(me.itemsize, self.size)):
            cut = SliceCut(lengths, self.size, lo, hi)
            plan = self._algorithm.all_gather(me, window(arrays, lo, hi), out_arrays, cut, all(in_place))
            self._launch(work, call, plan, (hi - lo) * self.size * me.itemsize, purpose)
        return work.wait() if wait else work

    @overload
    def broadcast(self, buffer: Buffer, src: int, purpose: str = ..., wait: Literal[True] = ...) -> Buffer: ...
    @overload
    def broadcast(self, buffer: Buffer, src: int, purpose: str = ..., *, wait: Literal[False]) -> Work[Buffer]: ...
    def broadcast(self, buffer: Buffer, src: int, purpose: str = "states", wait: bool = True) -> Any:
        """Every rank's buffer becomes that of member `src`, in place. Any shape."""
        checks.member(self.device, "broadcast", "src", src, self.size)
        work, me, call, array = self._whole("broadcast", buffer, root=src)
        for lo, hi in buckets(buffer.numel, self._limit(me.itemsize)):
            plan = self._algorithm.broadcast(me, [array[lo:hi]], src)
            self._launch(work, call, plan, (hi - lo) * me.itemsize, purpose)
        return work.wait() if wait else work

    @overload
    def reduce(
        self, buffer: Buffer, dst: int, op: str = ..., purpose: str = ..., wait: Literal[True] = ...
    ) -> Buffer: ...
    @overload
    def reduce(
        self, buffer: Buffer, dst: int, op: str = ..., purpose: str = ..., *, wait: Literal[False]
    ) -> Work[Buffer]: ...
    def reduce(self, buffer: Buffer, dst: int, op: str = "avg", purpose: str = "states", wait: bool = True) -> Any:
        """Member `dst`'s buffer becomes the reduction, in place; the others keep theirs. Any shape."""
        checks.member(self.device, "reduce", "dst", dst, self.size)
        work, me, call, array = self._whole("reduce", buffer, op, dst)
        for lo, hi in buckets(buffer.numel, self._limit(me.itemsize)):
            plan = self._algorithm.reduce(me, [array[lo:hi]], dst, op)
            self._launch(work, call, plan, (hi - lo) * me.itemsize, purpose)
        return work.wait() if wait else work

    def barrier(self) -> None:
        """Return once every member is here."""
        work: Work[None] = Work(self.device, None, [])
        everyone = range(self.size)
        self._launch(work, Call("barrier", "", ()), Plan([Hop(to=everyone, sources=everyone)], [], 0), 0, "control")
        work.wait()

    @overload
    def send(self, buffer: Buffer, dst: int, purpose: str = ..., wait: Literal[True] = ...) -> None: ...
    @overload
    def send(self, buffer: Buffer, dst: int, purpose: str = ..., *, wait: Literal[False]) -> Work[None]: ...
    def send(self, buffer: Buffer, dst: int, purpose: str = "states", wait: bool = True) -> Work[None] | None:
        """Send to member `dst`; waiting means until it has received."""
        checks.member(self.device, "send", "dst", dst, self.size)
        checks.buffers_of(self.device, "send", buffer)
        work: Work[None] = Work(self.device, None, [buffer])
        plan = Plan([Hop((buffer.array,), to=(RECEIVER,))], [(dst, buffer.nbytes, 1)], 0)
        self._launch_pair(work, "send", self.rank, dst, buffer, plan, purpose)
        return work.wait() if wait else work

    @overload
    def recv(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        src: int,
        kind: Kind = ...,
        purpose: str = ...,
        wait: Literal[True] = ...,
    ) -> Buffer: ...
    @overload
    def recv(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        src: int,
        kind: Kind = ...,
        purpose: str = ...,
        *,
        wait: Literal[False],
    ) -> Work[Buffer]: ...
    def recv(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        src: int,
        kind: Kind = Kind.ACTIVATION,
        purpose: str = "states",
        wait: bool = True,
    ) -> Any:
        """A new buffer of `kind` with what member `src` sent; shape and dtype must be what it sends."""
        checks.member(self.device, "recv", "src", src, self.size)
        buffer = self.device.alloc(shape, dtype, kind)
        out, copy = buffer.array, self.device.backend.copy
        work = Work(self.device, buffer, [])
        hop = Hop(sources=(SENDER,), move=lambda inbox: copy(inbox(SENDER)[0], out))
        plan = Plan([hop], [], buffer.nbytes)
        self._launch_pair(work, "recv", src, self.rank, buffer, plan, purpose)
        return work.wait() if wait else work
