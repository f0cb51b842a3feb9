"""A pipeline's schedule in slots: when each action runs where a forward takes one slot and a backward two.

Read off lists such as the engine runs (`parallel/pipeline.py`): an action starts when its stage is free and what it
needs is there, and sending takes no time. Not seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from zerosim.errors import InputError
from zerosim.parallel.schedule import Action, Forward

FORWARD_SLOTS, BACKWARD_SLOTS = 1, 2


class Slot(NamedTuple):
    """One action of a stage, and the slots that it takes: [start, stop)."""

    action: Action
    start: int
    stop: int


def slots_of(lists: Sequence[Sequence[Action]]) -> list[list[Slot]]:
    """By stage its actions in their order. Raises: InputError for lists that get stuck."""
    waiting, stages = [list(actions)[::-1] for actions in lists], len(lists)
    chunks = 1 + max(action.chunk for actions in lists for action in actions)
    placed: list[list[Slot]] = [[] for _ in lists]
    ends: dict[tuple[bool, int, int], int] = {}  # (forward, slot, place along the whole model): when it is over
    while any(waiting):
        before = sum(map(len, placed))
        for stage, actions in enumerate(waiting):
            while actions:
                needed = _needed(actions[-1], stage, stages, chunks)
                if needed is not None and needed not in ends:
                    break
                action, own = actions.pop(), placed[stage]
                start = max(own[-1].stop if own else 0, 0 if needed is None else ends[needed])
                stop = start + (FORWARD_SLOTS if isinstance(action, Forward) else BACKWARD_SLOTS)
                own.append(Slot(action, start, stop))
                ends[isinstance(action, Forward), action.slot, action.chunk * stages + stage] = stop
        if sum(map(len, placed)) == before:
            stuck = (f"stage {stage} before {actions[-1]}" for stage, actions in enumerate(waiting) if actions)
            raise InputError(f"every stage waits for another: {', '.join(stuck)}")
    return placed


def _needed(action: Action, stage: int, stages: int, chunks: int) -> tuple[bool, int, int] | None:
    """What has to be over first: the previous chunk's forward, the next one's backward, or the own forward."""
    place, last = action.chunk * stages + stage, stages * chunks - 1
    if isinstance(action, Forward):
        return (True, action.slot, place - 1) if place else None
    return (False, action.slot, place + 1) if place < last else (True, action.slot, place)


def counted_bubble(slots: Sequence[Sequence[Slot]]) -> Fraction:
    """Idle slots of a stage until the last one is done, over the slots that its actions take; the same on each."""
    end = max(own[-1].stop for own in slots)
    busy = sum(slot.stop - slot.start for slot in slots[0])
    return Fraction(end - busy, busy)
