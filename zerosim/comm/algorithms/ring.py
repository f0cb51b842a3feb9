"""Ring collectives: N-1 rounds, in each of which a rank sends one message. It goes to the right neighbour, except in
all_to_all.

Useful to study and to time; `direct.py` moves the same volume in one round. Two more things differ: a partial sum is
rounded to the wire's dtype at each hop, and chunk j is added in the order j+1, j+2, ..., j, so its bits are not those
of rank order. avg divides at the end, at the owner.

    reduce_scatter   hop h: send the partial sum of chunk rank-1-h, receive and add to that of rank-2-h
    all_gather       hop h: send chunk rank-h, receive chunk rank-1-h (all mod N)
    all_reduce       both, in place
    all_to_all       hop h = 1 to N-1: send rank+h its part, receive from rank-h. So ranks talk at a distance h. If each
                     part went from neighbour to neighbour, a rank would send N/2 times as much
    broadcast        a chain src, src+1, ...: each forwards the whole payload; N-1 hops
    reduce           a chain dst+1, dst+2, ..., dst, each adding its own

A rank joins all its rounds at once, before it waits (rounds of a group run in order), so a launched call needs no
further help from the rank's program. Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations", 2009.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from zerosim.backends.kernels import Array
from zerosim.comm.algorithms.execution import Cut, Execution, Member, carve, messages_of, others, take_parts
from zerosim.comm.transports.rounds import Exchange, Inbox, Move


def reduce_scatter(me: Member, fulls: Sequence[Array], mine: Sequence[Array], cut: Cut, op: str) -> Execution:
    """Reduce and scatter round the ring. Partial sums alternate between two temporaries: the right neighbour reads one
    while the other fills."""

    def partial(hop: int, owner: int) -> list[Array]:
        return carve(me.scratch(hop % 2, cut.size_of(owner)), cut.chunk(fulls, owner))

    return _reduce_ring(me, fulls, mine, cut, op, partial)


def all_reduce(me: Member, arrays: Sequence[Array], cut: Cut, op: str) -> Execution:
    """Reduce in place round the ring. Partial sums live in the arrays themselves: a hop overwrites only what was
    already sent."""

    def partial(hop: int, owner: int) -> list[Array]:
        return cut.chunk(arrays, owner)

    mine = cut.chunk(arrays, me.rank)
    scatter = _reduce_ring(me, arrays, mine, cut, op, partial)
    return scatter.then(all_gather(me, mine, arrays, cut, in_place=True))


def all_gather(me: Member, shards: Sequence[Array], outs: Sequence[Array], cut: Cut, in_place: bool) -> Execution:
    rank, size = me.rank, me.size
    rounds: list[Exchange] = []
    sending: Sequence[Array] = shards
    for hop in range(size - 1):
        target = cut.chunk(outs, (rank - 1 - hop) % size)
        own = [] if hop or in_place else list(zip(shards, cut.chunk(outs, rank), strict=True))
        rounds.append(_hop(me, sending, _copy_from_left(me, target, own)))
        sending = target
    sizes = [cut.size_of((rank - hop) % size) for hop in range(size)]
    return Execution(
        rounds=rounds,
        messages=messages_of((rank + 1) % size, Counter(sizes[:-1]).items(), me.itemsize),
        received_bytes=sum(sizes[1:]) * me.itemsize,
    )


def all_to_all(me: Member, fulls: Sequence[Array], outs: Sequence[Array], input_cut: Cut, output_cut: Cut) -> Execution:
    rounds: list[Exchange] = []
    messages: list[tuple[int, int, int]] = []
    for hop in range(1, me.size):
        to, source = (me.rank + hop) % me.size, (me.rank - hop) % me.size
        own = [] if hop > 1 else [me.rank]  # the local part is copied in the first hop
        move = take_parts(me, outs, output_cut, [*own, source])
        rounds.append(Exchange(fulls, lambda peer: input_cut.chunk(fulls, peer), [*own, to], [*own, source], move))
        messages += messages_of(to, [(input_cut.size_of(to), 1)], me.itemsize)
    return Execution(rounds, messages, others(output_cut, me.rank) * me.itemsize)


def broadcast(me: Member, arrays: Sequence[Array], src: int) -> Execution:
    place, hops = (me.rank - src) % me.size, me.size - 1
    copy = _copy_from_left(me, arrays, [])
    rounds = [_hop(me, arrays if hop == place else None, copy if hop == place - 1 else None) for hop in range(hops)]
    numel = sum(array.size for array in arrays)
    sent = messages_of((me.rank + 1) % me.size, [(numel, 1)], me.itemsize) if place < hops else []
    return Execution(rounds, sent, numel * me.itemsize if place else 0)


def reduce(me: Member, arrays: Sequence[Array], dst: int, op: str) -> Execution:
    place, hops = (me.rank - dst - 1) % me.size, me.size - 1
    numel = sum(array.size for array in arrays)
    partial = carve(me.scratch(0, numel), arrays) if 0 < place < hops else arrays
    add = _add_from_left(me, arrays, partial, op, at_end=place == hops)
    rounds = [_hop(me, partial if hop == place else None, add if hop == place - 1 else None) for hop in range(hops)]
    added = numel if place else 0
    return Execution(
        rounds=rounds,
        messages=messages_of((me.rank + 1) % me.size, [(numel, 1)], me.itemsize) if place < hops else [],
        received_bytes=added * me.itemsize,
        flops=added,
        bytes_read=2 * added * me.itemsize,
        bytes_written=added * me.itemsize,
    )


def _reduce_ring(
    me: Member,
    fulls: Sequence[Array],
    mine: Sequence[Array],
    cut: Cut,
    op: str,
    partial: Callable[[int, int], Sequence[Array]],
) -> Execution:
    """Run the reduction's hops. `partial(hop, owner)` is the place of the owner's partial sum in that hop."""
    rank, size = me.rank, me.size
    rounds: list[Exchange] = []
    sending: Sequence[Array] = cut.chunk(fulls, (rank - 1) % size)
    for hop in range(size - 1):
        owner, at_end = (rank - 2 - hop) % size, hop == size - 2
        target = mine if at_end else partial(hop, owner)
        rounds.append(_hop(me, sending, _add_from_left(me, cut.chunk(fulls, owner), target, op, at_end)))
        sending = target
    sizes = [cut.size_of((rank - 1 - hop) % size) for hop in range(size)]
    added = sum(sizes[1:])
    return Execution(
        rounds=rounds,
        messages=messages_of((rank + 1) % size, Counter(sizes[:-1]).items(), me.itemsize),
        received_bytes=added * me.itemsize,
        flops=added,
        bytes_read=2 * added * me.itemsize,
        bytes_written=added * me.itemsize,
    )


def _hop(me: Member, sending: Sequence[Array] | None, move: Move | None) -> Exchange:
    """Post to the right neighbour and read from the left one; None: not in this hop."""
    right, left = (me.rank + 1) % me.size, (me.rank - 1) % me.size
    return Exchange(sending or (), None, () if sending is None else (right,), () if move is None else (left,), move)


def _add_from_left(me: Member, own: Sequence[Array], target: Sequence[Array], op: str, at_end: bool) -> Move:
    """Set target to what the left neighbour posted + own, rounded to the wire's dtype."""
    left, size, backend = (me.rank - 1) % me.size, float(me.size), me.backend

    def move(inbox: Inbox) -> None:
        for partial, ours, out in zip(inbox(left), own, target, strict=True):
            backend.reduce((partial, ours), "sum" if op == "avg" else op, out)
            if at_end and op == "avg":
                backend.divide(out, size, out)

    return move


def _copy_from_left(me: Member, target: Sequence[Array], own: Sequence[tuple[Array, Array]]) -> Move:
    """Copy what the left neighbour posted into target; `own` are (source, out) pairs of this rank's own chunk."""
    left, copy = (me.rank - 1) % me.size, me.backend.copy

    def move(inbox: Inbox) -> None:
        for source, out in (*own, *zip(inbox(left), target, strict=True)):
            copy(source, out)

    return move
