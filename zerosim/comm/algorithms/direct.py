"""Direct collectives: every rank sends to every other rank, in one round.

reduce_scatter and all_gather move a ring's volume, (N-1)/N of the payload per rank, in one round. The owner of a chunk
adds its peers' parts IN RANK ORDER, in the compute dtype, and rounds once. The sum does not depend on which rank owns
which chunk, so every ZeRO stage gets the same bits.

What one rank sends (c elements per chunk, L per payload):

    reduce_scatter   (N-1) c     to each owner its chunk
    all_gather       (N-1) c     its chunk to everybody
    all_reduce     2 (N-1) c     both, in place; c = ceil(L/N), fewer where chunks are uneven
    all_to_all       (N-1) c     to each its part; uneven: all of L but the local part
    broadcast        (N-1) L     by the source alone
    reduce               L       by everybody but the destination
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.backends.kernels import Array
from zerosim.comm.algorithms.execution import EVERYBODY, Cut, Execution, Member, messages_of, others, take_parts
from zerosim.comm.transports.rounds import Exchange, Inbox


def reduce_scatter(me: Member, fulls: Sequence[Array], mine: Sequence[Array], cut: Cut, op: str) -> Execution:
    rank, reduce_kernel = me.rank, me.backend.reduce
    own, num_peers, everyone = cut.size_of(rank), me.size - 1, range(me.size)

    def move(inbox: Inbox) -> None:
        contributions = [inbox(peer) for peer in everyone]
        for parts, out in zip(zip(*contributions, strict=True), mine, strict=True):
            reduce_kernel(parts, op, out)

    return Execution(
        rounds=[Exchange(fulls, lambda owner: cut.chunk(fulls, owner), everyone, everyone, move if own else None)],
        messages=messages_of(EVERYBODY, cut.sizes_but(rank), me.itemsize),
        received_bytes=num_peers * own * me.itemsize,
        flops=num_peers * own,
        bytes_read=me.size * own * me.itemsize if num_peers else 0,
        bytes_written=own * me.itemsize if num_peers else 0,
    )


def all_gather(me: Member, shards: Sequence[Array], outs: Sequence[Array], cut: Cut, in_place: bool) -> Execution:
    rank, copy, everyone = me.rank, me.backend.copy, range(me.size)

    def move(inbox: Inbox) -> None:
        for peer in everyone:
            posted = () if peer == rank and in_place else inbox(peer)
            if posted:  # with very many ranks most may have nothing
                for shard, out in zip(posted, cut.chunk(outs, peer), strict=True):
                    copy(shard, out)

    own = cut.size_of(rank)
    return Execution(
        rounds=[Exchange(shards, None, everyone, everyone, move)],
        messages=messages_of(EVERYBODY, [(own, me.size - 1)], me.itemsize),
        received_bytes=others(cut, rank) * me.itemsize,
    )


def all_reduce(me: Member, arrays: Sequence[Array], cut: Cut, op: str) -> Execution:
    """Reduce in place: each rank adds up its own chunk of its arrays, then sends it to all."""
    mine = cut.chunk(arrays, me.rank)
    scatter = reduce_scatter(me, arrays, mine, cut, op)
    return scatter.then(all_gather(me, mine, arrays, cut, in_place=True))


def all_to_all(me: Member, fulls: Sequence[Array], outs: Sequence[Array], input_cut: Cut, output_cut: Cut) -> Execution:
    everyone, sizes = range(me.size), input_cut.sizes_but(me.rank)
    messages = messages_of(EVERYBODY, sizes, me.itemsize)
    if len(sizes) > 1:  # parts of several sizes: each message names its receiver
        receivers = [peer for peer in everyone if peer != me.rank]
        messages = [m for peer in receivers for m in messages_of(peer, [(input_cut.size_of(peer), 1)], me.itemsize)]
    move = take_parts(me, outs, output_cut, everyone)
    exchange = Exchange(fulls, lambda peer: input_cut.chunk(fulls, peer), everyone, everyone, move)
    return Execution([exchange], messages, others(output_cut, me.rank) * me.itemsize)


def broadcast(me: Member, arrays: Sequence[Array], src: int) -> Execution:
    copy = me.backend.copy

    def move(inbox: Inbox) -> None:
        for source, out in zip(inbox(src), arrays, strict=True):
            copy(source, out)

    numel = sum(array.size for array in arrays)
    if me.rank == src:
        sent = messages_of(EVERYBODY, [(numel, me.size - 1)], me.itemsize)
        return Execution([Exchange(arrays, to=range(me.size))], sent, 0)
    return Execution([Exchange(sources=(src,), move=move)], [], numel * me.itemsize)


def reduce(me: Member, arrays: Sequence[Array], dst: int, op: str) -> Execution:
    reduce_kernel, everyone = me.backend.reduce, range(me.size)

    def move(inbox: Inbox) -> None:
        for parts, out in zip(zip(*map(inbox, everyone), strict=True), arrays, strict=True):
            reduce_kernel(parts, op, out)

    numel, num_peers = sum(array.size for array in arrays), me.size - 1
    if me.rank != dst:
        return Execution([Exchange(arrays, to=(dst,))], messages_of(dst, [(numel, 1)], me.itemsize), 0)
    return Execution(
        rounds=[Exchange(arrays, sources=everyone, move=move)],
        messages=[],
        received_bytes=num_peers * numel * me.itemsize,
        flops=num_peers * numel,
        bytes_read=me.size * numel * me.itemsize if num_peers else 0,
        bytes_written=numel * me.itemsize if num_peers else 0,
    )
