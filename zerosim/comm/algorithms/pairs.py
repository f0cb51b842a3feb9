"""All pairs: in an all-reduce every rank sends its whole buffer to every other rank.

Many people picture an all-reduce this way, and here is its price: each rank sends (N-1) L, against the 2 (N-1)/N L of
`direct.py` and `ring.py`, N/2 times as much. Each rank adds all N buffers IN RANK ORDER and rounds once, so the bits
are those of `direct.py`. It also adds N times as much: every rank computes every sum.

What one rank sends (c elements per chunk, L per payload):

    all_reduce       (N-1) L     its whole buffer to everybody; no chunks, so that every rank sends the same
    reduce_scatter   (N-1) c     as direct: each pair of ranks already exchanges a chunk, and needs no more
    all_gather       (N-1) c     as direct
    all_to_all       (N-1) c     as direct
    broadcast        (N-1) L     as direct, by the source alone
    reduce               L       as direct, by everybody but the destination

Peers read a buffer until all of them have added it. So sums go to a temporary as large as the call, and replace the
buffer in a second round, which sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.backends.kernels import Array
from zerosim.comm.algorithms.direct import all_gather as all_gather
from zerosim.comm.algorithms.direct import all_to_all as all_to_all
from zerosim.comm.algorithms.direct import broadcast as broadcast
from zerosim.comm.algorithms.direct import reduce as reduce
from zerosim.comm.algorithms.direct import reduce_scatter as reduce_scatter
from zerosim.comm.algorithms.execution import EVERYBODY, Execution, Member, RangeCut, carve, messages_of
from zerosim.comm.transports.rounds import Exchange, Inbox


def all_reduce(me: Member, arrays: Sequence[Array], cut: RangeCut, op: str) -> Execution:
    """Reduce in place: every rank computes the whole sum."""
    backend, everyone, num_peers = me.backend, range(me.size), me.size - 1
    whole, numel = cut.whole(arrays), cut.numel
    sums = carve(me.scratch(0, numel), whole)

    def add(inbox: Inbox) -> None:
        for parts, total in zip(zip(*map(inbox, everyone), strict=True), sums, strict=True):
            backend.reduce(parts, op, total)

    def keep(inbox: Inbox) -> None:
        for total, out in zip(sums, whole, strict=True):
            backend.copy(total, out)

    return Execution(
        rounds=[
            Exchange(whole, None, everyone, everyone, add),
            Exchange(to=everyone, sources=everyone, move=keep),
        ],
        messages=messages_of(EVERYBODY, [(numel, num_peers)], me.itemsize),
        received_bytes=num_peers * numel * me.itemsize,
        flops=num_peers * numel,
        bytes_read=me.size * numel * me.itemsize,
        bytes_written=numel * me.itemsize,
    )
