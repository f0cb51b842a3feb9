"""The ranks' records in one order: each rank in turn runs up to its next unit or collective; all join it, then all end
it.

Each rank's record has its own order, and no clock orders events of different ranks: only that a collective's wait comes
after every member has joined. The order between ranks is a choice, the same one each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zerosim.device.events import Event, Launch, Mark, Wait
from zerosim.verbs import MESSAGES

Call = tuple[str, str, tuple[int, ...], int]
"""A collective's identity on all its ranks: verb, axis, group, and its number in that group."""


def call_of(launch: Launch) -> Call:
    """Return the collective that a rank joins. Both ends of a message are one call."""
    return "send" if launch.op in MESSAGES else launch.op, launch.axis, launch.group, launch.sequence


def in_order(records: Mapping[int, Sequence[Event]]) -> Iterator[tuple[int, int]]:
    """Yield every event of the records, as (rank, its number in that rank's record)."""
    launched: dict[Call, set[int]] = {}
    works: dict[tuple[int, int], Call] = {}  # by rank and work
    at = dict.fromkeys(sorted(records), 0)

    def can_go(rank: int) -> bool:
        if at[rank] == len(records[rank]):
            return False
        event = records[rank][at[rank]]
        call = works.get((rank, event.work)) if isinstance(event, Wait) else None
        return call is None or launched[call] >= _needed(call, rank) & records.keys()

    while left := [rank for rank in at if at[rank] < len(records[rank])]:
        able = [rank for rank in left if can_go(rank)] or left[:1]  # a record that was cut off waits for no rank
        for rank in able:
            while True:
                event = records[rank][at[rank]]
                if isinstance(event, Launch):
                    call = call_of(event)
                    works[rank, event.work] = call
                    launched.setdefault(call, set()).add(rank)
                yield rank, at[rank]
                at[rank] += 1
                if at[rank] == len(records[rank]) or isinstance(event, Wait | Mark):
                    break
                coming = records[rank][at[rank]]
                if coming.scope != event.scope or isinstance(coming, Launch | Wait):
                    break


def _needed(call: Call, rank: int) -> set[int]:
    """Return the ranks that must join before this rank goes on: all members, or a message's sender."""
    op, _, group, _ = call
    return {group[0]} if op == "send" else set(group)


def steps_of(events: Sequence[Event]) -> Sequence[Event]:
    """Return a record up to the end of its last step, which may have failed. Buffers freed when the program ends are
    left out."""
    last = max((at for at, event in enumerate(events) if isinstance(event, Mark)), default=len(events) - 1)
    later = (at for at, event in enumerate(events) if event.scope.step > events[last].scope.step)
    last = max((last, *later))
    while last + 1 < len(events) and events[last + 1].scope.step == events[last].scope.step:
        last += 1
    return events[: last + 1]
