"""Rounds that reach over processes: who sends what to whom, and what has arrived.

In each process the last of its own members to join hands the round to the thread that talks to MPI. That thread sends a
note to every other process with members in the round: the call, the parts that follow, for whom and in which shapes,
small parts within the note and the others under a tag. So no size has to be agreed on before, and the receiver can tell
a call that does not match from a message that is late.

Parts between members of one process stay in place. The order of rounds: `queues.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from zerosim.comm.transports.mpi.native import NativeCall
from zerosim.comm.transports.mpi.staging import Staging
from zerosim.comm.transports.mpi.wire import NO_TAG, Wire
from zerosim.comm.transports.rounds import Call, Copied, Key, Parts
from zerosim.comm.transports.threads import ThreadRound, ThreadTransport
from zerosim.device.events import Scope
from zerosim.dtypes import dtype as get_dtype


class Part(NamedTuple):
    """What one member sends another: the arrays' shapes, and the place of their bytes."""

    source: int
    target: int
    shapes: list[tuple[int, ...]]
    inline: bytes | None
    tag: int


class Header(NamedTuple):
    """One process's side of a round, for another process. `rank` joined first there, at `where` in its program."""

    key: Key
    call: Call
    rank: int
    where: Scope
    parts: list[Part]


class Remote(NamedTuple):
    """How rounds reach other processes.

    wire        carries bytes
    staging     where they lie here
    per_process how many ranks a process has
    sent_bytes  by rank, to other processes: payload, without headers
    head_of     the round that a round waits for: the first of its group, perhaps itself
    """

    wire: Wire
    staging: Staging
    per_process: int
    sent_bytes: dict[int, int]
    head_of: Callable[[RemoteRound], RemoteRound]

    def process_of(self, rank: int) -> int:
        """Return the process that holds a rank."""
        return rank // self.per_process


class RemoteRound(ThreadRound):
    """A round with members in other processes. `num_missing` counts the missing members of this one."""

    def __init__(
        self,
        transport: ThreadTransport,
        remote: Remote,
        key: Key,
        call: Call,
        first: tuple[int, Scope],
        local: Sequence[int],
    ) -> None:
        super().__init__(transport, key, call, first)
        self._remote = remote
        self.local = local  # indices in the group of this process's members
        self.num_missing = len(local)
        self._copied: dict[int, dict[tuple[str, str], int]] = {}  # by rank and direction
        self.native: NativeCall | None = None  # once all members have arrived
        self.awaited: set[tuple[int, int]] = set()  # (source, target) of parts that no header has announced yet
        self.inbox: dict[tuple[int, int], Parts] = {}
        self._arriving: list[tuple[tuple[int, int], list[Any]]] = []
        self._outgoing: list[Any] = []  # requests
        self._incoming: list[Any] = []
        self._sending: set[int] = set()  # ranks that large parts are sent to
        self._held: list[Any] = []  # bytes that messages in flight are read from

    def missing(self) -> list[int]:
        """Return the ranks whose arrival this round, or an earlier one of its group, waits for."""
        if self.num_missing:
            return [self.group[member] for member in self.local if self.exchanges[member] is None]
        head = self._remote.head_of(self)
        return sorted({self.group[source] for source, _ in head.awaited} or head._sending)

    def open(self) -> list[tuple[int, Header]]:
        """Start every send, and note which parts are awaited. Return the headers to send, by process."""
        wire, staging = self._remote.wire, self._remote.staging
        parts: dict[int, list[Part]] = {}
        for member in self.local:
            exchange, rank = self.exchanges[member], self.group[member]
            assert exchange is not None
            # Before a native collective every member hears from every other one that all have arrived.
            sources, targets = (
                (exchange.sources, exchange.to) if exchange.native is None else (range(len(self.group)),) * 2
            )
            self.awaited |= {(source, member) for source in sources if source not in self.local}
            views: list[Any] | None = None
            for target in targets:
                if target in self.local:
                    continue
                arrays = exchange.part_for(target)
                if views is None or exchange.part is not None:  # else all targets get the same
                    views = [staging.outgoing(array, rank) for array in arrays if array.size]
                    if staging.is_copy:
                        self._copy(rank, ("device", "host"), sum(view.nbytes for view in views))
                self._remote.sent_bytes[rank] += sum(array.nbytes for array in arrays)
                process, inline, tag = self._remote.process_of(self.group[target]), None, NO_TAG
                if sum(view.nbytes for view in views) <= staging.inline_bytes:
                    inline = b"".join(view.tobytes() for view in views)
                else:
                    tag = wire.new_tag()
                    self._sending.add(self.group[target])
                    self._held += views
                    for view in views:
                        self._outgoing += wire.send(process, tag, view)
                part = Part(member, target, [tuple(array.shape) for array in arrays], inline, tag)
                parts.setdefault(process, []).append(part)
        first, where = self.first
        return [(process, Header(self.key, self.call, first, where, mine)) for process, mine in parts.items()]

    def _copy(self, rank: int, way: tuple[str, str], nbytes: int) -> None:
        copied = self._copied.setdefault(rank, {})
        copied[way] = copied.get(way, 0) + nbytes

    def copies(self, rank: int) -> list[Copied]:
        """Return the copies through the host's memory on the rank's own way to others and back."""
        return [(*way, nbytes) for way, nbytes in self._copied.get(rank, {}).items() if nbytes]

    def take(self, process: int, header: Header) -> None:
        """Read another process's header: take the parts in it, and start receiving the rest."""
        for part in header.parts:
            pair = part.source, part.target
            self.awaited.discard(pair)
            kept, start = [], 0
            for shape in part.shapes:
                array, data = self._remote.staging.incoming(shape, get_dtype(self.call.dtype), self.group[part.target])
                kept.append(array)
                if not data.nbytes:
                    continue
                if part.inline is None:
                    self._incoming += self._remote.wire.receive(process, part.tag, data)
                else:
                    memoryview(data)[:] = part.inline[start : start + data.nbytes]
                    start += data.nbytes
            self._arriving.append((pair, kept))

    def is_complete(self) -> bool:
        """Return whether everything has arrived, and everything sent may be written again."""
        wire = self._remote.wire
        if self._incoming and wire.are_done(self._incoming):
            self._incoming = []
        if self._outgoing and wire.are_done(self._outgoing):
            self._outgoing, self._held = [], []
            self._sending.clear()
        return not (self.awaited or self._incoming or self._outgoing)

    def needs(self, process: int) -> bool:
        """Return whether something is awaited from this process, or waits until that process takes it."""
        ranks = self._sending | {self.group[source] for source, _ in self.awaited}
        return any(self._remote.process_of(rank) == process for rank in ranks)

    def take_arrived(self) -> None:
        """Return the inbox that the moves read."""
        staging = self._remote.staging
        for (source, target), kept in self._arriving:
            rank = self.group[target]
            arrays = [staging.arrived(array, rank) for array in kept]
            if staging.is_copy:
                self._copy(rank, ("host", "device"), sum(array.nbytes for array in arrays))
            self.inbox[source, target] = arrays
        self._arriving = []

    def posted_for(self, member: int, source: int) -> Parts:
        """Return the arrays that `source` posted for `member`, an index of this process."""
        exchange = self.exchanges[source]
        return self.inbox[source, member] if exchange is None else exchange.part_for(member)

    @property
    def is_moving(self) -> bool:
        """Whether large parts are in flight, from here or to here."""
        return bool(self._incoming or self._outgoing or self.native)

    @property
    def is_arriving(self) -> bool:
        """Whether bytes are arriving here."""
        return bool(self._incoming or self.native)
