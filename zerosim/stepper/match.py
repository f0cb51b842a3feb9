"""Events to stop at, and events in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from zerosim.backends.kernels import Backend
from zerosim.config.option import known_word
from zerosim.device.device import Kind, Phase
from zerosim.device.events import (
    COMPUTE,
    CPU,
    Alloc,
    Copy,
    Event,
    Free,
    Kernel,
    Launch,
    Mark,
    Message,
    Move,
    Refusal,
    Retag,
    Save,
    Scope,
    Segment,
    Wait,
)
from zerosim.device.work import EAGER_PARTS
from zerosim.errors import InputError, did_you_mean
from zerosim.ledger.memory import MARKS
from zerosim.placement.memories import DEVICE, HOST
from zerosim.state.saver import AFTER_SAVE
from zerosim.verbs import VERBS

EVENTS = (
    "alloc", "copy", "free", "kernel", "launch", "mark", "message", "refusal", "retag", "save",
    "wait",
)  # fmt: skip
_NAMES = [name for name in vars(Backend) if not name.startswith("_") and name != "name"]
KERNELS = tuple(sorted({*_NAMES, *EAGER_PARTS} - {"attention", "attention_backward"}))


class Moment(NamedTuple):
    """One event of one rank, the `number`-th of its record; `text` is the event in words."""

    rank: int
    number: int
    event: Event
    text: str

    def __repr__(self) -> str:
        return f"rank {self.rank}, event {self.number}: {self.text}"


class Match(NamedTuple):
    """The conditions that an event must meet to be stopped at; None matches all.

    what    an operation (all_gather), a kind of event (alloc, launch, wait), a mark (end_of_backward), a kernel
    phase   forward, backward, optimizer, init, evaluate, save, curvature_forward, curvature_backward, curvature
    kind    of memory, for alloc and retag
    """

    what: str | None = None
    rank: int | None = None
    phase: str | None = None
    unit: str | None = None
    kind: str | None = None
    step: int | None = None

    def matches(self, rank: int, event: Event) -> bool:
        scope = event.scope
        return (
            (self.rank is None or rank == self.rank)
            and (self.phase is None or scope.phase == self.phase)
            and (self.unit is None or scope.unit == self.unit)
            and (self.step is None or scope.step == self.step)
            and (self.kind is None or getattr(event, "kind", None) == self.kind)
            and (self.what is None or self.what in names(event))
        )

    def checked(self, ranks: int, units: Collection[str], steps: int) -> Match:
        """Return the match in the world's own words: reduce-scatter becomes reduce_scatter.

        Raises: InputError for a condition that no event of this world can meet, with the nearest possible one.
        """
        for name in ("rank", "step"):
            whole_number(name, getattr(self, name))
        if self == Match():
            raise InputError("until what? name an event such as 'all_gather', or a rank, phase, unit, kind or step")
        if self.rank is not None and not 0 <= self.rank < ranks:
            raise InputError(f"rank {self.rank}: this world has ranks 0 to {ranks - 1}")
        if self.step is not None and not 0 <= self.step < steps:
            raise InputError(f"step {self.step}: this run has steps 0 to {steps - 1}")
        found: dict[str, str] = {}
        for name, value, known in (
            ("what", self.what, [*sorted(VERBS), *EVENTS, *MARKS, AFTER_SAVE, *KERNELS]),
            ("phase", self.phase, [phase.value for phase in Phase]),
            ("unit", self.unit, [*units, "loss"]),
            ("kind", self.kind, [kind.value for kind in Kind]),
        ):
            if value is None:
                continue
            if not isinstance(value, str):
                raise InputError(f"{name} {value!r}: expected text")
            word = known_word(value, known)
            if word is None:
                otherwise = f"expected one of {', '.join(known[:20])}"
                hint = did_you_mean(value, dict.fromkeys(known), otherwise, most=3, quote=str)
                raise InputError(f"{'event' if name == 'what' else name} {value!r} never comes: {hint}")
            found[name] = word
        return self._replace(**found)  # type: ignore[arg-type]

    def __str__(self) -> str:
        given = self._asdict().items()
        return ", ".join(
            f"{value}" if name == "what" else f"{name} {value}" for name, value in given if value is not None
        )


def whole_number(name: str, value: object) -> None:
    """Check a number. Raises: InputError unless it is a whole number or None."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise InputError(f"{name} {value!r}: expected a whole number")


def names(event: Event) -> tuple[str, ...]:
    """Return the words by which `until` knows an event."""
    own = type(event).__name__.lower()
    if isinstance(event, Launch):
        return own, event.op
    if isinstance(event, Kernel | Mark):
        return own, event.name
    return (own,)


def where_in_step(scope: Scope) -> str:
    """Return 'step 0, forward of h.1'."""
    between = scope.step >= 0 and scope.phase == "init"  # the last frees of a step, after its phases
    phase = scope.phase.replace("_", " ")
    where = "between phases" if between else phase + (f" of {scope.unit}" if scope.unit else "")
    where += f", microbatch {scope.slot}" if scope.slot else ""
    return f"step {scope.step}, {where}" if scope.step >= 0 else where


def numbered(op: str, sequence: int) -> str:
    """Return 'all_gather #23': a collective by its number in its group, from 0, which is the same on every rank."""
    return f"{op} #{sequence}"


def describe(event: Event, live: Mapping[int, Alloc], before: Sequence[Event]) -> str:
    """Return an event in words. `live` are the allocs of live buffers, by id; `before` is its rank's record up to
    it."""
    return f"{_what(event, live, before)}, {where_in_step(event.scope)}"


def _what(event: Event, live: Mapping[int, Alloc], before: Sequence[Event]) -> str:
    match event:
        case Alloc():
            return f"alloc {event.nbytes:,} B of {event.kind}{_where(event.memory)}"
        case Free():
            freed = live.get(event.id)
            gone = f" {freed.nbytes:,} B of {freed.kind}" if freed is not None else ""
            return f"free{gone}{_where(event.memory)}"
        case Copy():
            return f"copy {event.nbytes:,} B, {event.source} to {event.target}"
        case Kernel():
            return f"kernel {event.name}{_where(event.place)}, {event.flops:,} flops"
        case Launch():
            call = numbered(event.op, event.sequence) + (f" over {event.axis}" if event.axis != "dp_shard" else "")
            return f"{call} of {event.payload_bytes:,} B ({event.dtype}), sends {event.sent_bytes:,} B"
        case Wait():
            launches = (
                past for past in reversed(before) if isinstance(past, Launch | Copy) and past.work == event.work
            )
            launch = next(launches, None)
            done = numbered(launch.op, launch.sequence) if isinstance(launch, Launch) else "a collective"
            if isinstance(launch, Copy):
                done = f"the copy from {launch.source} to {launch.target}"
            who = "wait" if event.by == COMPUTE else f"{'the CPU' if event.by == CPU else event.by} waits"
            return f"{who}: {done} is done"
        case Message():
            whom = "each of the others" if event.peer < 0 else f"rank {event.peer}"
            return f"message of {event.nbytes:,} B to {whom}"
        case Retag():
            return f"retag to {event.kind}"
        case Mark():
            return f"mark {event.name}"
        case Save():
            return f"{event.op} saves its {event.what}, {event.nbytes:,} B"
        case Refusal():
            return f"refused: {event.nbytes:,} B of {event.kind} do not fit{_where(event.memory)}"
        case Segment():
            done = "takes" if event.nbytes > 0 else "gives back"
            return f"the allocator {done} {abs(event.nbytes):,} B at address {event.address:,}"
        case Move():
            return f"move {event.nbytes:,} B from address {event.source:,} to {event.target:,}"
        case _:
            return type(event).__name__.lower()


def _where(memory: str) -> str:
    """Return a memory in words; nothing for the device, on which most events happen."""
    return "" if memory == DEVICE else f" on {memory if memory != HOST else 'the host'}"
