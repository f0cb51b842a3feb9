"""Schedules in slots: every action once, none before what it needs, and the bubble of the closed form."""

from __future__ import annotations

from itertools import pairwise

import pytest

from zerosim.analysis.formulas import bubble
from zerosim.analysis.slots import counted_bubble, slots_of
from zerosim.parallel.schedule import Forward


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_the_bubble_is_that_of_the_papers(kind: str, stages: int) -> None:
    for chunks in (2, 3) if kind == "interleaved" else (1,):
        for micro_batches in (stages, 2 * stages, 3 * stages):
            slots = slots_of(kind, stages, micro_batches, chunks)
            assert counted_bubble(slots) == bubble(stages, micro_batches, chunks)
            assert all(len(own) == 2 * micro_batches * chunks for own in slots)


def test_nothing_runs_before_what_it_needs() -> None:
    slots = slots_of("1f1b", 3, 4)
    ends = {
        (stage, isinstance(slot.action, Forward), slot.action.slot): slot
        for stage, own in enumerate(slots)
        for slot in own
    }
    for batch in range(4):
        for stage in range(2):
            assert ends[stage, True, batch].stop <= ends[stage + 1, True, batch].start
            assert ends[stage + 1, False, batch].stop <= ends[stage, False, batch].start
        assert ends[2, True, batch].stop <= ends[2, False, batch].start
    for own in slots:
        assert all(one.stop <= other.start for one, other in pairwise(own))
