"""A pipeline's schedule in slots: when each action runs where a forward takes one slot and a backward two, or one for
the input's gradient and one for the weights'.

Read off lists such as the engine runs (`parallel/pipeline.py`): an action starts when its stage is free and what it
needs is there, and sending takes no time. Not seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from zerosim.errors import InputError
from zerosim.parallel.schedule import Action, needs
from zerosim.placement.stages import Chunks


class Slot(NamedTuple):
    """One action of a stage, and the slots that it takes: [start, stop)."""

    action: Action
    start: int
    stop: int


def slots_of(lists: Sequence[Sequence[Action]], lie: Chunks | None = None) -> list[list[Slot]]:
    """By stage its actions in their order; `lie`: where chunks lie, unless in rounds.

    Raises: InputError for lists that get stuck.
    """
    waiting, chunks = [list(actions)[::-1] for actions in lists], lie or _in_rounds(lists)
    placed: list[list[Slot]] = [[] for _ in lists]
    ends: dict[tuple[str, int, int], int] = {}  # (letter, micro-batch, chunk of the model): when it is over
    while any(waiting):
        before = sum(map(len, placed))
        for stage, actions in enumerate(waiting):
            while actions:
                number = chunks.number(stage, actions[-1].chunk)
                letters, other = needs(actions[-1], number, chunks.last) or ("", 0)
                over = [ends[key] for letter in letters if (key := (letter, actions[-1].slot, other)) in ends]
                if letters and not over:
                    break
                action, own = actions.pop(), placed[stage]
                start = max(over + [slot.stop for slot in own[-1:]], default=0)
                own.append(Slot(action, start, start + action.length))
                ends[action.letter, action.slot, number] = own[-1].stop
        if sum(map(len, placed)) == before:
            stuck = (f"stage {stage} before {actions[-1]}" for stage, actions in enumerate(waiting) if actions)
            raise InputError(f"every stage waits for another: {', '.join(stuck)}")
    return placed


def _in_rounds(lists: Sequence[Sequence[Action]]) -> Chunks:
    return Chunks(len(lists), 1 + max(action.chunk for actions in lists for action in actions))


def counted_bubble(slots: Sequence[Sequence[Slot]]) -> Fraction:
    """By makespan: idle slots of a stage until the last one is done, over the slots that its actions take; the same on
    each."""
    end = max(own[-1].stop for own in slots)
    return Fraction(end - _busy(slots[0]), _busy(slots[0]))


def counted_own_span(slots: Sequence[Sequence[Slot]]) -> Fraction:
    """By own span: idle slots of a stage between its first action and its last; of the stage that has most."""
    idle = max(own[-1].stop - own[0].start - _busy(own) for own in slots)
    return Fraction(idle, _busy(slots[0]))


def _busy(own: Sequence[Slot]) -> int:
    return sum(slot.stop - slot.start for slot in own)
