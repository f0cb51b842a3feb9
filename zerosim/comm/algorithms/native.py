"""Native collectives: one call of the transport's own engine (MPI's, NCCL's) in place of rounds.

The engine's messages are not seen: payload is counted as always, `sent_bytes` and `received_bytes` are unknown, and
`modelled_bytes` is what a ring would send. The engine chooses the order of sums and rounds half types at each of its
hops, so weights agree with those of `direct.py` within that rounding, not to the bit. Several buffers in one call are
as many native calls.

A ring sends (c elements of each rank's chunk, L of a payload): reduce_scatter and all_gather (N-1) c, all_reduce both,
all_to_all every part but the local one, broadcast and reduce L from every rank but the last of the chain.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.backends.kernels import Array, Native
from zerosim.comm.algorithms.execution import Cut, Execution, Member, check_part, others
from zerosim.comm.transports.rounds import Exchange, Inbox


def reduce_scatter(me: Member, fulls: Sequence[Array], mine: Sequence[Array], cut: Cut, op: str) -> Execution:
    return _execution(me, Native("reduce_scatter", _filled(fulls), mine, op), _but(me, cut, me.rank))


def all_gather(me: Member, shards: Sequence[Array], outs: Sequence[Array], cut: Cut, in_place: bool) -> Execution:
    return _execution(me, Native("all_gather", shards, _filled(outs)), _but(me, cut, (me.rank + 1) % me.size))


def all_reduce(me: Member, arrays: Sequence[Array], cut: Cut, op: str) -> Execution:
    filled = _filled(arrays)
    sent = _but(me, cut, me.rank) + _but(me, cut, (me.rank + 1) % me.size)
    return _execution(me, Native("all_reduce", filled, filled, op), sent)


def all_to_all(me: Member, fulls: Sequence[Array], outs: Sequence[Array], input_cut: Cut, output_cut: Cut) -> Execution:
    """Exchange parts. If they are uneven, ranks first compare sizes in a round without bytes: an engine would hang or
    write too far."""
    splits = [input_cut.size_of(peer) for peer in range(me.size)], [output_cut.size_of(peer) for peer in range(me.size)]
    native = _execution(me, Native("all_to_all", fulls, outs, splits=splits), others(input_cut, me.rank))
    if input_cut is output_cut:  # even: all ranks agree already
        return native
    return native._replace(rounds=[_sizes(me, fulls, input_cut, output_cut), *native.rounds])


def _sizes(me: Member, fulls: Sequence[Array], input_cut: Cut, output_cut: Cut) -> Exchange:
    """Tell each member how much it will receive, as the number of rows of an array without columns."""
    everyone = range(me.size)

    def part(peer: int) -> list[Array]:
        return [chunk.reshape(-1, 1)[:, :0] for chunk in input_cut.chunk(fulls, peer)]

    def move(inbox: Inbox) -> None:
        for peer in everyone:
            check_part(me, peer, sum(rows.shape[0] for rows in inbox(peer)), output_cut.size_of(peer))

    return Exchange((), part, everyone, everyone, move)


def broadcast(me: Member, arrays: Sequence[Array], src: int) -> Execution:
    filled = _filled(arrays)
    is_last = (me.rank + 1) % me.size == src
    return _execution(me, Native("broadcast", filled, filled, root=src), 0 if is_last else _numel(arrays))


def reduce(me: Member, arrays: Sequence[Array], dst: int, op: str) -> Execution:
    filled = _filled(arrays)
    return _execution(me, Native("reduce", filled, filled, op, dst), 0 if me.rank == dst else _numel(arrays))


def _execution(me: Member, native: Native, modelled_numel: int) -> Execution:
    return Execution(
        [Exchange(native=native._replace(number=me.number))], [], None, modelled_bytes=modelled_numel * me.itemsize
    )


def _filled(arrays: Sequence[Array]) -> list[Array]:
    return [array for array in arrays if array.size]


def _numel(arrays: Sequence[Array]) -> int:
    return sum(array.size for array in arrays)


def _but(me: Member, cut: Cut, owner: int) -> int:
    """Return the elements of all chunks but the owner's."""
    return cut.size_of(me.rank) + others(cut, me.rank) - cut.size_of(owner)
