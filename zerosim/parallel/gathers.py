"""How stage 3 gathers a flat's parameters from its ranks' shards.

    AllGather   one all_gather                                      (N-1)/N of the buffer sent by each rank
    TwoHops     MiCS (arXiv 2205.00119, 3.3): across nodes each     (n-1)/n of 1/d of it, d ranks in each of n nodes
                rank gathers with those of its place in the other
                nodes; within a node, n slices in one call          (d-1)/d of it

Both give the same bits. `quantized.py` gathers codes. When TwoHops launches a gather, only its first hop starts;
waiting for the gather runs the second.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from zerosim.comm.collectives import Comm
from zerosim.comm.group import Work
from zerosim.comm.groups import Groups
from zerosim.device.device import Buffer, Kind
from zerosim.placement.mesh import FINER
from zerosim.tensor.flat import Flat

NODES, NODE = FINER["dp_shard"]
"""The axes across nodes and within one, among those that cut model states."""


class Arriving(Protocol):
    """Parameters in flight."""

    def wait(self) -> Buffer:
        """Wait for the whole buffer."""
        ...


class AllGather:
    """`comm`: the ranks that each hold one `shard` of the flat's parameters.

    `bucket`: elements of a buffer through which stages 1 and 2 gather new parameters; 0: they arrive where they belong.
    """

    in_place = True  # a shard may be sent from its place in the whole

    def __init__(self, bucket: int = 0) -> None:
        self.bucket = bucket

    def join(self, groups: Groups) -> None:
        """Join the ranks."""
        self.groups = groups

    def gather(self, flat: Flat, comm: Comm, shard: Buffer) -> Buffer:
        """Gather the whole into a new buffer."""
        return comm.all_gather(shard)

    def launch(self, flat: Flat, comm: Comm, shard: Buffer) -> Arriving:
        """Launch the same gather."""
        return comm.launch_all_gather(shard, kind=Kind.PREFETCHED_PARAM)


class TwoHops(AllGather):
    in_place = False

    def gather(self, flat: Flat, comm: Comm, shard: Buffer) -> Buffer:
        if comm.size == self.groups(NODE).size:  # a second shard is already within the node
            return super().gather(flat, comm, shard)
        return self._within(shard.numel, self.groups(NODES).all_gather(shard, kind=Kind.COMM), Kind.UNSHARDED_PARAM)

    def launch(self, flat: Flat, comm: Comm, shard: Buffer) -> Arriving:
        if comm.size == self.groups(NODE).size:
            return super().launch(flat, comm, shard)
        return Within(self, shard.numel, self.groups(NODES).launch_all_gather(shard, kind=Kind.PREFETCHED_PARAM))

    def _within(self, numel: int, arrived: Buffer, kind: Kind) -> Buffer:
        """Run the second hop: gather each node's slices, of which this rank has one."""
        node, nodes = self.groups(NODE), self.groups(NODES)
        full = arrived.device.alloc((numel * node.size * nodes.size,), arrived.dtype, kind)
        pieces, windows = _cut(arrived, nodes.size), _cut(full, nodes.size)
        node.all_gather(pieces, out=windows)
        return full


class Within(NamedTuple):
    """A gather in two hops whose first hop is in flight."""

    hops: TwoHops
    numel: int
    first: Work[Buffer]

    def wait(self) -> Buffer:
        return self.hops._within(self.numel, self.first.wait(), Kind.PREFETCHED_PARAM)


def _cut(buffer: Buffer, count: int) -> list[Buffer]:
    each = buffer.numel // count
    return [buffer[at * each : (at + 1) * each] for at in range(count)]
