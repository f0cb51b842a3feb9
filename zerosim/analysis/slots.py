"""A pipeline's schedule in time slots: a forward takes one slot, and a backward two, or one for
the input's gradient and one for the weights'.

The times come from the engine's action lists (`parallel/pipeline.py`). An action starts when its pipeline stage is free
and its inputs are ready, and sending takes no time. Slots are not seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from zerosim.errors import InputError
from zerosim.parallel.schedule import Action, needs
from zerosim.placement.stages import Chunks


class Slot(NamedTuple):
    """One action of a pipeline stage, and its time slots: [start, stop)."""

    action: Action
    start: int
    stop: int


def slots_of(lists: Sequence[Sequence[Action]], lie: Chunks | None = None) -> list[list[Slot]]:
    """Return each pipeline stage's actions in order; `lie`: the placement of chunks, if not in rounds.

    Raises: InputError for lists that deadlock.
    """
    waiting, chunks = [list(actions)[::-1] for actions in lists], lie or _in_rounds(lists)
    placed: list[list[Slot]] = [[] for _ in lists]
    ends: dict[tuple[str, int, int], int] = {}  # (letter, microbatch, chunk of the model): when the action ends
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
    """Count the bubble by makespan: a pipeline stage's idle slots until the last action ends, over its busy slots. It
    is the same on every stage."""
    end = max(own[-1].stop for own in slots)
    return Fraction(end - _busy(slots[0]), _busy(slots[0]))


def counted_own_span(slots: Sequence[Sequence[Slot]]) -> Fraction:
    """Count the bubble by own span: idle slots between a pipeline stage's first and last action, on the stage with the
    most."""
    idle = max(own[-1].stop - own[0].start - _busy(own) for own in slots)
    return Fraction(idle, _busy(slots[0]))


def _busy(own: Sequence[Slot]) -> int:
    return sum(slot.stop - slot.start for slot in own)
