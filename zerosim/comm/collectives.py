"""Collectives as a rank's program calls them: c10d's verbs on Buffers.

Every verb has two forms. `launch_all_gather(...)` returns a `Work` at once: until the program waits for it, its inputs
must not be written nor its outputs read. `all_gather(...)` launches, waits and returns the result. A call takes one
buffer or, where the signature says so, several. `src` and `dst` are indices in the group. How a call is made of rounds:
`direct.py`, `ring.py`, `pairs.py`, `native.py`; messages between two ranks: `messages.py`; how a call is recorded:
`group.py`; which arguments are refused: `checks.py`.

Legend: N group size, c elements of a rank's slice, L elements of a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerosim.comm import checks
from zerosim.comm.algorithms.execution import Cut, Execution, RangeCut, SliceCut, SplitCut, buckets, others, window
from zerosim.comm.group import Buffers, Work, at_once
from zerosim.comm.messages import Messages
from zerosim.comm.transports.rounds import Call, Exchange
from zerosim.device.device import Buffer, Kind
from zerosim.errors import InputError


class Comm(Messages):
    """One rank's membership in a group, with the verbs. `rank` is its index in the group, `ranks` are global."""

    def subgroup(self, ranks: Sequence[int], axis: str | None = None, number: int = 0) -> Comm:
        """Return the group of these global ranks, this one among them. Needs no communication.

        MPI's native collectives need a different `number`, the same on all members, for each group that shares members
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

    def barrier(self) -> None:
        """Return once every member has arrived."""
        work: Work[None] = Work(self.device, None, [])
        everyone = range(self.size)
        self._launch(
            work, Call("barrier", "", ()), Execution([Exchange(to=everyone, sources=everyone)], [], 0), 0, "control"
        )
        work.wait()

    def launch_all_reduce(self, buffer: Buffers, op: str = "avg", purpose: str = "states") -> Work[Buffers]:
        """Replace every rank's buffers by their reduction, in place. Any shapes."""
        buffers, call = self._open("all_reduce", buffer, op)
        arrays = [checks.flat(self.device, "all_reduce", b) for b in buffers]
        lengths = [b.numel for b in buffers]
        work = Work(self.device, buffer, buffers)
        me = self._member(work, buffers[0].dtype)
        for lo, hi in buckets(sum(lengths), self._even_limit(me.itemsize)):
            execution = self._algorithm.all_reduce(me, arrays, RangeCut(lengths, self.size, lo, hi), op)
            self._launch(work, call, execution, (hi - lo) * me.itemsize, purpose)
        return work

    all_reduce = at_once(launch_all_reduce)

    def launch_reduce_scatter(
        self,
        full: Buffers,
        out: Buffers | None = None,
        kind: Kind = Kind.GRAD,
        op: str = "avg",
        purpose: str = "states",
    ) -> Work[Buffers]:
        """Set out (c) to this rank's slice of the reduction of every rank's full (N*c).

        Without `out` a buffer of `kind` is allocated. `out` may be the window of `full`'s own slice.
        """
        name = "reduce_scatter"
        fulls, call = self._open(name, full, op)
        lengths = [checks.slice_numel(self.device, name, b, self.size) for b in fulls]
        outs = self._outputs(name, out, lengths, fulls[0].dtype, kind)
        for part, whole in zip(outs, fulls, strict=True):
            checks.in_place(self.device, name, part, whole, self.rank)
        work = Work(self.device, _like(full, outs), fulls)
        me = self._member(work, fulls[0].dtype)
        arrays, out_arrays = [b.array for b in fulls], [b.array for b in outs]
        for lo, hi in buckets(sum(lengths), self._limit(me.itemsize, self.size)):
            cut = SliceCut(lengths, self.size, lo, hi)
            execution = self._algorithm.reduce_scatter(me, arrays, window(out_arrays, lo, hi), cut, op)
            self._launch(work, call, execution, (hi - lo) * self.size * me.itemsize, purpose)
        return work

    reduce_scatter = at_once(launch_reduce_scatter)

    def launch_all_gather(
        self,
        shard: Buffers,
        out: Buffers | None = None,
        kind: Kind = Kind.UNSHARDED_PARAM,
        purpose: str = "states",
    ) -> Work[Buffers]:
        """Set out (N*c) to every rank's shard (c), in rank order.

        Without `out` a buffer of `kind` is allocated. `shard` may be the window of `out`'s own slice.
        """
        name = "all_gather"
        shards, call = self._open(name, shard)
        for b in shards:
            checks.shape(self.device, name, "shard", b, (b.numel,))
        lengths = [b.numel for b in shards]
        outs = self._outputs(name, out, [self.size * c for c in lengths], shards[0].dtype, kind)
        in_place = [
            checks.in_place(self.device, name, part, whole, self.rank) for part, whole in zip(shards, outs, strict=True)
        ]
        work = Work(self.device, _like(shard, outs), shards)
        me = self._member(work, shards[0].dtype)
        arrays, out_arrays = [b.array for b in shards], [b.array for b in outs]
        for lo, hi in buckets(sum(lengths), self._limit(me.itemsize, self.size)):
            cut = SliceCut(lengths, self.size, lo, hi)
            execution = self._algorithm.all_gather(me, window(arrays, lo, hi), out_arrays, cut, all(in_place))
            self._launch(work, call, execution, (hi - lo) * self.size * me.itemsize, purpose)
        return work

    all_gather = at_once(launch_all_gather)

    def launch_all_to_all(
        self,
        buffer: Buffer,
        out: Buffer | None = None,
        kind: Kind = Kind.ACTIVATION,
        purpose: str = "states",
        *,
        input_split_sizes: Sequence[int] | None = None,
        output_split_sizes: Sequence[int] | None = None,
    ) -> Work[Buffer]:
        """Set part j of out to part `rank` of member j's buffer: each rank sends each other one a different part.

        Both are flat, with one part per member, in rank order. By default parts are even: buffer (N*c), out (N*c).
        Split sizes, given on every rank, make them uneven: `input_split_sizes[j]` elements go to member j and
        `output_split_sizes[j]` come from it, 0 included (c10d's all_to_all_single). An uneven call is not cut into
        buckets. Without `out` a buffer of `kind` is allocated. `out` must not overlap `buffer`.

        Raises: InputError for sizes that do not fit this rank's buffer; Mismatch if two ranks' sizes differ.
        """
        name, inputs, outputs = "all_to_all", input_split_sizes, output_split_sizes
        _, call = self._open(name, buffer)
        if inputs is None or outputs is None:
            if inputs is not outputs:
                raise InputError(
                    f"rank {self.device.rank}: {name} with only one of input_split_sizes and output_split_sizes: "
                    "pass both, or neither"
                )
            length = checks.slice_numel(self.device, name, buffer, self.size)
            [target] = self._outputs(name, out, [buffer.numel], buffer.dtype, kind)
            limit = self._limit(buffer.dtype.itemsize, self.size)
            even = [SliceCut([length], self.size, lo, hi) for lo, hi in buckets(length, limit)]
            cuts: list[tuple[Cut, Cut]] = [(cut, cut) for cut in even]
        else:
            sent, received = [int(size) for size in inputs], [int(size) for size in outputs]
            checks.split_sizes(self.device, name, self.rank, self.size, buffer, sent, received)
            [target] = self._outputs(name, out, [sum(received)], buffer.dtype, kind)
            cuts, call = [(SplitCut(sent), SplitCut(received))], call._replace(shapes=(), reduction="uneven")
        checks.apart(self.device, name, target, buffer)
        work = Work(self.device, target, [buffer])
        me = self._member(work, buffer.dtype)
        for pair in cuts:
            execution = self._algorithm.all_to_all(me, [buffer.array], [target.array], *pair)
            numel = max(cut.size_of(self.rank) + others(cut, self.rank) for cut in pair)
            self._launch(work, call, execution, numel * me.itemsize, purpose)
        return work

    all_to_all = at_once(launch_all_to_all)

    def launch_broadcast(self, buffer: Buffer, src: int, purpose: str = "states") -> Work[Buffer]:
        """Replace every rank's buffer by that of member `src`, in place. Any shape."""
        checks.member(self.device, "broadcast", "src", src, self.size)
        work, me, call, array = self._whole("broadcast", buffer, root=src)
        for lo, hi in buckets(buffer.numel, self._limit(me.itemsize)):
            execution = self._algorithm.broadcast(me, [array[lo:hi]], src)
            self._launch(work, call, execution, (hi - lo) * me.itemsize, purpose)
        return work

    broadcast = at_once(launch_broadcast)

    def launch_reduce(self, buffer: Buffer, dst: int, op: str = "avg", purpose: str = "states") -> Work[Buffer]:
        """Replace member `dst`'s buffer by the reduction, in place; the other buffers stay. Any shape."""
        checks.member(self.device, "reduce", "dst", dst, self.size)
        work, me, call, array = self._whole("reduce", buffer, op, dst)
        for lo, hi in buckets(buffer.numel, self._limit(me.itemsize)):
            execution = self._algorithm.reduce(me, [array[lo:hi]], dst, op)
            self._launch(work, call, execution, (hi - lo) * me.itemsize, purpose)
        return work

    reduce = at_once(launch_reduce)


def _like(given: Buffer | list[Buffer], outs: list[Buffer]) -> Any:
    """Return a list for a list, and one buffer for one."""
    return outs if isinstance(given, list) else outs[0]
