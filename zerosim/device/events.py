"""The events of one rank.

Everything that zerosim prints about memory, traffic or work is read from the stream of them (`recorder.py`); a reader
(`ledger/`) never touches a device. Every event carries its scope.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from zerosim.placement.memories import DEVICE
from zerosim.placement.spec import unit_of

COMPUTE, CPU = "compute", "cpu"
"""The waiter for a copy: the device, or its host's CPU."""


class Scope(NamedTuple):
    """The place of an event in the program. `step` is -1 while the world is set up."""

    step: int = -1
    phase: str = "init"
    unit: str = ""
    slot: int = 0

    @property
    def block(self) -> str:
        """The unit; for a leaf module in a block, the block."""
        return unit_of(self.unit)


class Alloc(NamedTuple):
    """An allocation: `nbytes` are live under `id` in one of the rank's memories (`device/memory.py`); `padding_bytes`
    of them hold no parameter of the model. An optimizer's states have a `name`."""

    scope: Scope
    id: int
    nbytes: int
    reserved_bytes: int
    kind: str
    padding_bytes: int
    name: str = ""
    memory: str = DEVICE


class Free(NamedTuple):
    """A free: the bytes of `id` are no longer live in that memory."""

    scope: Scope
    id: int
    memory: str = DEVICE


class Refusal(NamedTuple):
    """The memory's allocator had no room for `nbytes` more."""

    scope: Scope
    nbytes: int
    kind: str
    memory: str = DEVICE


class Segment(NamedTuple):
    """The allocator took `nbytes` of the device's memory at `address`, or gave them back (a negative number)."""

    scope: Scope
    address: int
    nbytes: int


class Move(NamedTuple):
    """To merge holes, the `nbytes` of `id` were copied from address `source` to `target`."""

    scope: Scope
    id: int
    source: int
    target: int
    nbytes: int


class Retag(NamedTuple):
    """The bytes of `id` have a new purpose."""

    scope: Scope
    id: int
    kind: str


class Kernel(NamedTuple):
    """Work on the device, or on its host's CPU (`place`). `engine` is 'matmul' or 'vector'; flops are counted by the
    operation. `shape`: see `device/work.py`.

    `work` is the collective to which the kernel's sums belong, None for a kernel of the program.
    """

    scope: Scope
    name: str
    engine: str
    flops: int
    bytes_read: int
    bytes_written: int
    shape: tuple[int, ...] = ()
    work: int | None = None
    place: str = DEVICE


class Save(NamedTuple):
    """The op `op` saved `nbytes` of buffer `id` for its backward, as its `what`; other ops may hold them too."""

    scope: Scope
    op: str
    what: str
    id: int
    nbytes: int


class Launch(NamedTuple):
    """This rank joined a collective. Payload is the whole logical tensor, in bytes; for an uneven all_to_all the larger
    of the rank's two buffers.

    `sent_bytes` and `received_bytes` cross this rank's links. They are None for a library's own
    collective (MPI, NCCL), which does not report them; then `modelled_bytes` is a ring's
    traffic. `sequence` counts the group's collectives; `axis` is the mesh axis, which is the clock's stream;
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
        """The bytes sent or, if not observed, the bytes that a ring would send."""
        return (self.sent_bytes or 0) if self.modelled_bytes is None else self.modelled_bytes


class Copy(NamedTuple):
    """A copy of `nbytes` between a rank's own memories.

    `purpose` is 'staging', a message that passes through the host; 'offload', data in another memory until their use;
    'saves', buffers saved for backward; 'pages', paged states; or 'control', a norm's sums. With a `work` the copy was
    launched, after the earlier work of its stream `after`; without one it had ended when the program continued.
    """

    scope: Scope
    source: str
    target: str
    nbytes: int
    purpose: str = "staging"
    work: int | None = None
    after: str = COMPUTE


class Wait(NamedTuple):
    """This rank waited for the result of `work`, a collective or a copy. `by` is the waiter:
    the device's `COMPUTE`, the host's `CPU`, or a stream, whose later launches then wait."""

    scope: Scope
    work: int
    by: str = COMPUTE


class CpuEvent(NamedTuple):
    """The host's CPU gets here when all that it was given before is over: who waits for `work` goes on then."""

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
    """A named mark of the program, such as 'end_of_backward'."""

    scope: Scope
    name: str


class Turn(NamedTuple):
    """From here on, until the next turn, events may depend on whether the rank owns this flat. Recorded only on a
    device that `takes_turns`."""

    scope: Scope
    flat: str


class Pool(NamedTuple):
    """The report of this rank's memory pool on a real device at the mark before: bytes in use, and reserved."""

    scope: Scope
    used_bytes: int
    held_bytes: int


Event = (
    Alloc | Free | Refusal | Segment | Move | Retag | Kernel | Save | Launch | Copy | Wait | CpuEvent | Message | Mark
    | Turn | Pool
)  # fmt: skip


def on_device(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events without those of the rank's other memories."""
    return (event for event in events if getattr(event, "memory", DEVICE) == DEVICE)
