"""How arrays are cut into chunks, and one rank's part in one collective call.

A call works on a list of flat arrays, as if they were one. A `Cut` says which part of them is chunk j, the part that
member j of the group owns. With buckets a call carries only [lo, hi):

    SliceCut  reduce_scatter, all_gather: every array holds N equal slices, and chunk j is [lo, hi) of
              slice j. So a bucket takes the same sub-range of every rank's slice, and who owns what
              does not depend on the bucket size.
    RangeCut  all_reduce: [lo, hi) of the arrays in N runs of ceil((hi - lo) / N) elements; the last
              runs are shorter or empty (no padding). Who adds a run does not change its bits.
    SplitCut  all_to_all with uneven parts: chunk j has the j-th of N sizes, zero included. Even parts are a
              SliceCut. Each rank has two cuts, of its input and of its output.

An `Execution` is one rank's part in a call, as an algorithm (`direct.py`, `ring.py`, `pairs.py`) makes it: its rounds,
and the bytes that cross its links and its adders in them. Legend: N group size, c elements per slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from zerosim.backends.kernels import Array, Backend
from zerosim.comm.transports.rounds import Exchange, Inbox, Move
from zerosim.errors import Mismatch

EVERYBODY = -1
"""As a message's peer: one message to each of `count` other members."""


def spans(lengths: Sequence[int], lo: int, hi: int) -> list[tuple[int, int, int]]:
    """Return [lo, hi) of arrays of these lengths laid end to end, as (array, start, stop), without empty parts."""
    found = []
    begin = 0
    for index, length in enumerate(lengths):
        start, stop = max(lo - begin, 0), min(hi - begin, length)
        if start < stop:
            found.append((index, start, stop))
        begin += length
    return found


def window(arrays: Sequence[Array], lo: int, hi: int) -> list[Array]:
    """Return views of [lo, hi) of the arrays laid end to end."""
    return [arrays[i][start:stop] for i, start, stop in spans([array.size for array in arrays], lo, hi)]


def carve(flat: Array, like: Sequence[Array]) -> list[Array]:
    """Return views of `flat`, one after the other, of the sizes of `like`."""
    ends = [0, *accumulate(array.size for array in like)]
    return [flat[start:stop] for start, stop in pairwise(ends)]


def buckets(numel: int, limit: int | None) -> Iterator[tuple[int, int]]:
    """Return [0, numel) in runs of at most `limit`, the first ones full; always at least one run."""
    step = numel if limit is None else limit
    yield 0, min(step, numel)
    for lo in range(step, numel, max(step, 1)):
        yield lo, min(lo + step, numel)


class Cut(Protocol):
    """Which member owns which part of the arrays."""

    def size_of(self, owner: int) -> int:
        """Return the elements of a member's chunk."""
        ...

    def sizes_but(self, member: int) -> list[tuple[int, int]]:
        """Return (elements, how many) of the other members' chunks, equal ones together, in their order."""
        ...

    def chunk(self, arrays: Sequence[Array], owner: int) -> list[Array]:
        """Return views of the owner's chunk, at most one per array."""
        ...


class SliceCut:
    """Chunk j is [lo, hi) of the j-th of N slices; `lengths` are elements per slice of each array."""

    def __init__(self, lengths: Sequence[int], size: int, lo: int, hi: int) -> None:
        self._num = size
        self._numel = hi - lo
        self._spans = [(i, lengths[i], start, stop) for i, start, stop in spans(lengths, lo, hi)]

    def size_of(self, owner: int) -> int:
        return self._numel

    def sizes_but(self, member: int) -> list[tuple[int, int]]:
        return [(self._numel, self._num - 1)]

    def chunk(self, arrays: Sequence[Array], owner: int) -> list[Array]:
        return [arrays[i][owner * c + start : owner * c + stop] for i, c, start, stop in self._spans]


class RangeCut:
    """Chunk j is the j-th run of ceil((hi - lo) / N) elements of [lo, hi); `lengths` are the arrays'."""

    def __init__(self, lengths: Sequence[int], size: int, lo: int, hi: int) -> None:
        self._lengths = lengths
        self._num = size
        self._lo = lo
        self._hi = hi
        self._step = -(-(hi - lo) // size)

    @property
    def numel(self) -> int:
        """Elements of all chunks together."""
        return self._hi - self._lo

    def whole(self, arrays: Sequence[Array]) -> list[Array]:
        """Return views of all chunks together, at most one per array."""
        return window(arrays, self._lo, self._hi)

    def _edge(self, owner: int) -> int:
        return min(self._lo + owner * self._step, self._hi)

    def size_of(self, owner: int) -> int:
        return self._edge(owner + 1) - self._edge(owner)

    def sizes_but(self, member: int) -> list[tuple[int, int]]:
        """Return at most three sizes: whole runs, the one that ends the range, empty ones after it."""
        whole, rest = divmod(self._hi - self._lo, self._step) if self._step else (0, 0)
        counts = {self._step: whole, rest: 1 if rest else 0, 0: self._num - whole - bool(rest)}
        counts[self.size_of(member)] -= 1
        return [(size, count) for size, count in counts.items() if size and count]

    def chunk(self, arrays: Sequence[Array], owner: int) -> list[Array]:
        parts = spans(self._lengths, self._edge(owner), self._edge(owner + 1))
        return [arrays[i][start:stop] for i, start, stop in parts]


class SplitCut:
    """Chunk j has the j-th of `sizes`, in elements; chunks lie end to end."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._edges = [0, *accumulate(sizes)]

    def size_of(self, owner: int) -> int:
        return self._sizes[owner]

    def sizes_but(self, member: int) -> list[tuple[int, int]]:
        return list(Counter(self._sizes[:member] + self._sizes[member + 1 :]).items())

    def chunk(self, arrays: Sequence[Array], owner: int) -> list[Array]:
        start, stop = self._edges[owner : owner + 2]
        return [array[start:stop] for array in arrays if start < stop]


class Member(NamedTuple):
    """A rank for which an algorithm prepares a call: its index in the group, and its backend and scratch memory."""

    rank: int
    size: int
    itemsize: int
    backend: Backend
    scratch: Callable[[int, int], Array]
    """scratch(i, numel): the call's i-th temporary. Every bucket uses the same memory."""
    number: int = 0
    """The group's number, for engines that number groups (`Mesh.number`)."""


class Execution(NamedTuple):
    """One call as one rank sees it. Peers are indices in the group, or EVERYBODY."""

    rounds: list[Exchange]
    messages: list[tuple[int, int, int]]
    """(peer, bytes, count) of each message that this rank sends."""
    received_bytes: int | None
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    """Bytes of memory that this rank's additions read and write."""
    modelled_bytes: int | None = None
    """Bytes that a ring would send, for a native call whose messages are not seen."""

    @property
    def sent_bytes(self) -> int | None:
        if self.modelled_bytes is not None:
            return None
        return sum(nbytes * count for _, nbytes, count in self.messages)

    def then(self, other: Execution) -> Execution:
        """Return this execution followed by the other, in one call; both of rounds."""
        assert self.received_bytes is not None
        assert other.received_bytes is not None
        return Execution(
            self.rounds + other.rounds,
            self.messages + other.messages,
            self.received_bytes + other.received_bytes,
            self.flops + other.flops,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
        )


def messages_of(peer: int, sizes: Iterable[tuple[int, int]], itemsize: int) -> list[tuple[int, int, int]]:
    """Return one record per size for `count` messages of so many elements, in the order given; empty ones are not
    sent."""
    return [(peer, size * itemsize, count) for size, count in sizes if size and count]


def others(cut: Cut, member: int) -> int:
    """Return how many elements all chunks but this member's have."""
    return sum(size * count for size, count in cut.sizes_but(member))


def take_parts(me: Member, outs: Sequence[Array], cut: Cut, peers: Iterable[int]) -> Move:
    """Return a move of an all_to_all: copy what these members posted into their chunks of `outs`.

    The move raises: Mismatch if a member posted another number of elements.
    """

    def move(inbox: Inbox) -> None:
        for peer in peers:
            parts = inbox(peer)
            check_part(me, peer, sum(part.size for part in parts), cut.size_of(peer))
            for part, out in zip(parts, cut.chunk(outs, peer), strict=True):
                me.backend.copy(part, out)

    return move


def check_part(me: Member, peer: int, sent: int, expected: int) -> None:
    """Check a member's part. Raises: Mismatch if its number of elements is not the expected one."""
    if sent != expected:
        raise Mismatch(
            f"all_to_all: member {peer} of the group sends {sent} elements to member {me.rank}, which expects "
            f"{expected}: input_split_sizes[{me.rank}] of the sender and output_split_sizes[{peer}] of the receiver "
            "must be equal"
        )


class Algorithm(Protocol):
    """How a collective is made of rounds; `direct.py`, `ring.py`, `pairs.py` and `native.py` are four ways.

    Arrays are flat. `fulls` and `outs` of reduce_scatter and all_gather are whole buffers that `cut` cuts; `shards` and
    `mine` are the views of this rank's chunk, one per view of `cut.chunk`. In all_to_all `input_cut` gives the part for
    each member, `output_cut` the place of each member's part.
    """

    def reduce_scatter(
        self, me: Member, fulls: Sequence[Array], mine: Sequence[Array], cut: Cut, op: str
    ) -> Execution: ...

    def all_gather(
        self, me: Member, shards: Sequence[Array], outs: Sequence[Array], cut: Cut, in_place: bool
    ) -> Execution: ...

    def all_reduce(self, me: Member, arrays: Sequence[Array], cut: RangeCut, op: str) -> Execution: ...

    def all_to_all(
        self, me: Member, fulls: Sequence[Array], outs: Sequence[Array], input_cut: Cut, output_cut: Cut
    ) -> Execution: ...

    def broadcast(self, me: Member, arrays: Sequence[Array], src: int) -> Execution: ...

    def reduce(self, me: Member, arrays: Sequence[Array], dst: int, op: str) -> Execution: ...
