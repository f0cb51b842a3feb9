"""What happened on one rank, in order: the events, and the recorder that keeps them.

Everything that zerosim prints about memory, traffic or work is read from this stream; a reader
(`ledger/`) never touches a device. Every event carries the scope it happened in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol
from weakref import ref

from zerosim.placement.spec import unit_of


class Scope(NamedTuple):
    """Where in the program an event happened. `step` is -1 while the world is set up."""

    step: int = -1
    phase: str = "init"
    unit: str = ""
    slot: int = 0

    @property
    def block(self) -> str:
        """The unit, of a leaf module in a block the block."""
        return unit_of(self.unit)


class Alloc(NamedTuple):
    """`nbytes` now live under `id`; `padding_bytes` of them hold no parameter of the model. An optimizer's states have
    a `name`."""

    scope: Scope
    id: int
    nbytes: int
    reserved_bytes: int
    kind: str
    padding_bytes: int
    name: str = ""


class Free(NamedTuple):
    """The bytes of `id` are no longer live."""

    scope: Scope
    id: int


class Refusal(NamedTuple):
    """The allocator had no room for `nbytes` more."""

    scope: Scope
    nbytes: int
    kind: str


class Segment(NamedTuple):
    """The allocator took `nbytes` of the device's memory at `address`, or gave them back (a negative number)."""

    scope: Scope
    address: int
    nbytes: int


class Move(NamedTuple):
    """To make one hole of several, the `nbytes` of `id` were copied from address `source` to `target`."""

    scope: Scope
    id: int
    source: int
    target: int
    nbytes: int


class Retag(NamedTuple):
    """The bytes of `id` now serve another purpose."""

    scope: Scope
    id: int
    kind: str


class Kernel(NamedTuple):
    """Work on the device. `engine` is 'matmul' or 'vector'; flops are counted by the operation. `shape`: see
    `device/work.py`.

    `work` is the collective whose sums these are, None for a kernel of the program.
    """

    scope: Scope
    name: str
    engine: str
    flops: int
    bytes_read: int
    bytes_written: int
    shape: tuple[int, ...] = ()
    work: int | None = None


class Save(NamedTuple):
    """The op `op` holds `nbytes` of buffer `id` for its backward, as its `what`; others may hold them too."""

    scope: Scope
    op: str
    what: str
    id: int
    nbytes: int


class Launch(NamedTuple):
    """This rank joined a collective. Payload is the whole logical tensor, in bytes; of an uneven all_to_all the larger
    of the rank's two buffers.

    `sent_bytes` and `received_bytes` are what crosses this rank's links in it. None: the call was left to
    an engine that does not tell (MPI's, NCCL's own collective); then `modelled_bytes` is what a ring would
    send. `sequence` counts the group's collectives; `axis` is the mesh axis, that is the clock's stream;
    `algorithm` made the rounds.
    """

    scope: Scope
    work: int
    op: str
    dtype: str
    purpose: str
    axis: str
    group: tuple[int, ...]
    sequence: int
    payload_bytes: int
    sent_bytes: int | None
    received_bytes: int | None
    modelled_bytes: int | None = None
    algorithm: str = "direct"

    @property
    def wire_bytes(self) -> int:
        """What was sent or, where that was not seen, what a ring would have sent."""
        return (self.sent_bytes or 0) if self.modelled_bytes is None else self.modelled_bytes


class Copy(NamedTuple):
    """`nbytes` went between a rank's own memories, 'device' and 'host'.

    `purpose` is 'staging', a message that passes through the host, or 'offload', what waits there until it is used.
    """

    scope: Scope
    source: str
    target: str
    nbytes: int
    purpose: str = "staging"


class HostAlloc(NamedTuple):
    """`nbytes` of this rank now live in the host's memory under `id`."""

    scope: Scope
    id: int
    nbytes: int
    kind: str


class HostFree(NamedTuple):
    """The bytes of `id` are no longer live in the host's memory."""

    scope: Scope
    id: int


class Wait(NamedTuple):
    """This rank needed the result of `work` and went on when it was there."""

    scope: Scope
    work: int


class Message(NamedTuple):
    """`count` messages of `nbytes` each left this rank for `peer` (-1: one each to `count` other members)."""

    scope: Scope
    work: int
    peer: int
    nbytes: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody wants here


class Mark(NamedTuple):
    """A named point of the program, such as 'end_of_backward'."""

    scope: Scope
    name: str


class Pool(NamedTuple):
    """What a real device's memory pool of this rank reported at the mark before: bytes in use, and held."""

    scope: Scope
    used_bytes: int
    held_bytes: int


Event = (
    Alloc
    | Free
    | Refusal
    | Segment
    | Move
    | Retag
    | Kernel
    | Save
    | Launch
    | Copy
    | HostAlloc
    | HostFree
    | Wait
    | Message
    | Mark
    | Pool
)


class Reader(Protocol):
    """Folds events into a ledger, in order."""

    def read(self, events: list[Event]) -> None: ...


class Recorder:
    """Collects one rank's events and hands them to its readers.

    Readers are fed in batches (`drain`, once a step), so that a long run keeps its ledgers and not
    its history. With `keep` the drained events stay in `history`.

    The recorder also hears when an owner of bytes dies (`watch`): a weak reference's callback puts the death into a
    queue. The next event, drain or change of scope records it first (`settle`), as if it had been recorded at once.
    The callback is the deque's own `append`. Python runs a signal's handler only between bytecodes, and `append` has
    none, so Ctrl-C cannot land there. It could land in a `__del__`. Python ignores what a destructor raises: then the
    interrupt would be lost, and the `Free` with it.
    """

    def __init__(self, readers: tuple[Reader, ...] = (), *, keep: bool = False, enabled: bool = True) -> None:
        self.history: list[Event] = []
        self.readers = readers
        self.keep = keep
        self.enabled = enabled
        self.where = Scope()  # the device's, for deaths
        self.release: Callable[[int], None] = lambda id: None  # the device's allocator takes back what a `Free` names
        self._events: list[Event] = []
        self.owners: dict[ref[object], tuple[type[Free | HostFree], int]] = {}  # and how to record the end of each
        self.dead: deque[ref[object]] = deque()  # of those, in order
        self.bury = self.dead.append

    @property
    def events(self) -> list[Event]:
        """What has been recorded since the last drain."""
        self.settle()
        return self._events

    def add(self, event: Event) -> None:
        if self.dead:
            self.settle()
        if self.enabled:
            self._events.append(event)

    def put(self, event: Event) -> None:
        """`add` without the deaths since the last event."""
        if self.enabled:
            self._events.append(event)

    def watch(self, owner: object, end: type[Free | HostFree], id: int) -> None:
        """Record the `end` of `id` when `owner` dies."""
        self.owners[ref(owner, self.bury)] = end, id

    def settle(self) -> None:
        """Record the deaths since the last event, in their order."""
        dead, owners = self.dead, self.owners
        while dead:
            end, id = owners.pop(dead.popleft())
            if end is Free:
                self.release(id)
            self.put(tuple.__new__(end, (self.where, id)))  # half the time of end(self.where, id)

    def drain(self) -> None:
        """Feed what has been collected to the readers, then forget it (or keep it)."""
        self.settle()
        self.feed()

    def feed(self) -> None:
        """`drain` without the deaths since the last event."""
        events, self._events = self._events, []
        for reader in self.readers:
            reader.read(events)
        if self.keep:
            self.history.extend(events)
