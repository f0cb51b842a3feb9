"""The one primitive under every collective: a round, and what carries it.

Each rank of a group joins a round with a `Exchange`: a few arrays, which part of them is for which peer, and
a `move` that fills the rank's own outputs out of what its peers posted for it. Moves run when all are there; waiting
needs nobody's help, so that handles may be waited for in any order, and a rank may join several rounds before it waits.

Rounds of one group run in the order in which they are joined. A collective of several rounds rests on that.

Where ranks queue their work (a GPU's streams), moves are queued behind all that was posted, and what
any rank queues afterwards behind all moves (`meet`).

How a round is carried: between threads (`threads.py`), between processes (`mpi/`), or not at all (`fake.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from zerosim.backends.kernels import Array, Native, Stream, StreamEvent

Parts = Sequence[Array]
Inbox = Callable[[int], Parts]
"""inbox(j): what member j of the group posted for this rank."""
Move = Callable[[Inbox], None]
"""Fills one rank's outputs out of its inbox."""


class Exchange(NamedTuple):
    """One round as one rank sees it. Peers are indices in the group; a rank may be its own."""

    posted: Parts = ()
    part: Callable[[int], Parts] | None = None
    """part(j): what of `posted` member j reads. None: all of it."""
    to: Sequence[int] = ()
    """Who reads what this rank posted."""
    sources: Sequence[int] = ()
    """Whose parts `move` reads, or whose arrival the round waits for."""
    move: Move | None = None
    native: Native | None = None
    """In place of all the above."""

    def part_for(self, member: int) -> Parts:
        return self.posted if self.part is None else self.part(member)


class Call(NamedTuple):
    """What every rank of a group must agree on in one round.

    `root` is the member that broadcasts or receives, -1 without one; `pair` marks a round of a
    sender and a receiver, 1 + its tag; it is numbered apart from the collectives of the same two ranks.
    """

    op: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    reduction: str = ""  # of a pair: what the message is called; of an all_to_all: uneven or ''
    root: int = -1
    pair: int = 0

    def describe(self, first: bool = True) -> str:
        """'all_reduce avg of fp32 (4, 8)'; of a pair, the first member sends and the second receives."""
        op = self.op if not self.pair else "send" if first else "recv"
        words = [op, self.reduction, f"root {self.root}" if self.root >= 0 else ""]
        if self.dtype:
            words += ["of", self.dtype, " and ".join(str(shape) for shape in self.shapes)]
        return " ".join(word for word in words if word)


class Key(NamedTuple):
    """Which round: number `number` of the group's collective (or of a pair's message) number `sequence`. The group's
    ranks are global."""

    pair: int
    group: tuple[int, ...]
    sequence: int
    number: int = 0


Copied = tuple[str, str, int]
"""From which of a rank's own memories to which other one, and how many bytes."""


class Round(Protocol):
    """A round that a rank has joined."""

    def copies(self, rank: int) -> Sequence[Copied]:
        """What passed through the host's memory on the rank's own way to others and back, once the round is over."""
        ...

    def wait(self, rank: int) -> None:
        """Return once every move of the round has run."""
        ...


class Transport(Protocol):
    """What carries rounds."""

    is_staged: bool
    """Whether what goes to other ranks passes through the host's memory, and is in `Round.copies`."""

    def join(self, rank: int, key: Key, call: Call, exchange: Exchange) -> Round:
        """Join a round; `rank` is global.

        Raises: Mismatch when `call` differs from that of the first to join.
        """
        ...


def meet(streams: Sequence[Stream], events: Sequence[StreamEvent]) -> None:
    """What any of these streams is given from here on runs after all the events. The first stands in for the rest."""
    first, *others = streams
    for event in events:
        first.wait_event(event)
    joint = first.record_event()
    for stream in others:
        stream.wait_event(joint)
