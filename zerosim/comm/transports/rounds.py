"""The one primitive under every collective: a round, and its transport.

Each rank of a group joins a round with an `Exchange`: a few arrays, the part of them for each peer, and a `move` that
fills the rank's own outputs from its peers' arrays. Moves run when all members have joined; waiting needs no help from
other ranks, so handles may be waited for in any order, and a rank may join several rounds before it waits.

Rounds of one group run in the order in which they are joined. A collective of several rounds depends on that.

Where ranks queue their work (a GPU's streams), moves are queued after everything posted, and later work of any rank
after all moves (`meet`).

A round is carried between threads (`threads.py`), between processes (`mpi/`), or not at all (`fake.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from zerosim.backends.kernels import Array, Native, Stream, StreamEvent

Parts = Sequence[Array]
Inbox = Callable[[int], Parts]
"""inbox(j): the arrays that member j of the group posted for this rank."""
Move = Callable[[Inbox], None]
"""Fills one rank's outputs from its inbox."""


class Exchange(NamedTuple):
    """One rank's view of a round. Peers are indices in the group; a rank may be its own peer."""

    posted: Parts = ()
    part: Callable[[int], Parts] | None = None
    """part(j): the part of `posted` that member j reads. None: all of it."""
    to: Sequence[int] = ()
    """The members that read what this rank posted."""
    sources: Sequence[int] = ()
    """The members whose parts `move` reads, or whose arrival the round waits for."""
    move: Move | None = None
    native: Native | None = None
    """In place of all the above."""

    def part_for(self, member: int) -> Parts:
        return self.posted if self.part is None else self.part(member)


class Call(NamedTuple):
    """The arguments on which every rank of a group must agree in one round.

    `root` is the member that broadcasts or receives, -1 without one; `pair` marks a round of a
    sender and a receiver, 1 + its tag; it is numbered apart from the collectives of the same two ranks.
    """

    op: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    reduction: str = ""  # of a pair: the message's name; of an all_to_all: uneven or ''
    root: int = -1
    pair: int = 0

    def describe(self, first: bool = True) -> str:
        """Return 'all_reduce avg of fp32 (4, 8)'; of a pair, the first member sends and the second receives."""
        op = self.op if not self.pair else "send" if first else "recv"
        words = [op, self.reduction, f"root {self.root}" if self.root >= 0 else ""]
        if self.dtype:
            words += ["of", self.dtype, " and ".join(str(shape) for shape in self.shapes)]
        return " ".join(word for word in words if word)


class Key(NamedTuple):
    """Identifies a round: number `number` of the group's collective (or of a pair's message) number `sequence`. The
    group's ranks are global."""

    pair: int
    group: tuple[int, ...]
    sequence: int
    number: int = 0


Copied = tuple[str, str, int]
"""From one of a rank's memories to another, with the number of bytes."""


class Round(Protocol):
    """A round that a rank has joined."""

    def copies(self, rank: int) -> Sequence[Copied]:
        """Return the copies through the host's memory on the rank's own way to others and back, once the round is
        over."""
        ...

    def wait(self, rank: int) -> None:
        """Return once every move of the round has run."""
        ...


class Transport(Protocol):
    """A transport of rounds."""

    is_staged: bool
    """Whether messages to other ranks pass through the host's memory, and appear in `Round.copies`."""

    def join(self, rank: int, key: Key, call: Call, exchange: Exchange) -> Round:
        """Join a round; `rank` is global.

        Raises: Mismatch if `call` differs from that of the first to join.
        """
        ...


def meet(streams: Sequence[Stream], events: Sequence[StreamEvent]) -> None:
    """Make everything queued from here on, on any of these streams, run after all the events. The first stream stands
    in for the rest."""
    first, *others = streams
    for event in events:
        first.wait_event(event)
    joint = first.record_event()
    for stream in others:
        stream.wait_event(joint)
