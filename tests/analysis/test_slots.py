"""Schedules in slots: every action once, none before what it needs, and the bubble of the closed form."""

from __future__ import annotations

from itertools import pairwise

import pytest

from zerosim.analysis.formulas import bubble, own_span_bubble
from zerosim.analysis.slots import counted_bubble, counted_own_span, slots_of
from zerosim.errors import InputError
from zerosim.parallel.pipeline import SCHEDULES, one_f_one_b
from zerosim.parallel.schedule import Backward, Forward
from zerosim.placement.stages import Chunks


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8])
def test_the_bubble_is_that_of_the_papers(kind: str, stages: int) -> None:
    """By makespan, and by own span: zb-v has none of the latter, and H1 loses p-1-i slots on stage i."""
    apart = kind in ("zb-h1", "zb-v")
    for chunks in {"interleaved": (2, 3), "zb-v": (2,)}.get(kind, (1,)):
        for micro_batches in (stages, 2 * stages, 3 * stages)[kind == "zb-v" :]:
            lists = [SCHEDULES[kind](stages, stage, micro_batches, chunks) for stage in range(stages)]
            slots = slots_of(lists, Chunks(stages, chunks, turns_back=kind == "zb-v"))
            sizes = {"p": stages, "m": micro_batches, "v": chunks}
            assert counted_bubble(slots) == bubble(kind).at(sizes)
            assert counted_own_span(slots) == own_span_bubble(kind).at(sizes)
            assert all(len(own) == (3 if apart else 2) * micro_batches * chunks for own in slots)
            if kind == "zb-h1":
                idle = [own[-1].stop - own[0].start - 3 * micro_batches for own in slots]
                assert idle == [stages - 1 - stage for stage in range(stages)]


def test_nothing_runs_before_what_it_needs() -> None:
    slots = slots_of([one_f_one_b(3, stage, 4) for stage in range(3)])
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


def test_lists_that_get_stuck_are_refused() -> None:
    """In rounds of p - i: stage 0 waits for the gradient of batch 2, stage 1 for batch 3, which comes after it."""
    lists = []
    for size in (3, 2, 1):
        rounds = [range(first, min(first + size, 4)) for first in range(0, 4, size)]
        lists.append([way(slot) for turn in rounds for way in (Forward, Backward) for slot in turn])
    with pytest.raises(InputError, match=r"stage 0 before Backward\(slot=2, chunk=0\), stage 1 before Forward\(slot=3"):
        slots_of(lists)
