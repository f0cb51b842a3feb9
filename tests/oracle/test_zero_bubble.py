"""zb-h1, zb-v and interleaved beside PyTorch's own action lists, ScheduleInterleavedZeroBubble (one chunk a rank),
ScheduleZBVZeroBubble and ScheduleInterleaved1F1B: the same actions in the same order, and so the same bubble and the
same live chunks."""

from __future__ import annotations

from typing import Any

import pytest

from zerosim.analysis.formulas import bubble
from zerosim.analysis.slots import counted_bubble, slots_of
from zerosim.parallel.pipeline import SCHEDULES
from zerosim.parallel.schedule import KINDS, Action, live
from zerosim.placement.stages import Chunks

try:
    from torch.distributed.pipelining.schedules import (
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleZBVZeroBubble,
    )
except ImportError as error:
    pytest.skip(f"this build of PyTorch has no zero-bubble schedules: {error}", allow_module_level=True)

SIZES = [(p, m) for p in (2, 3, 4, 8) for m in (2 * p, 2 * p + 1, 3 * p, 5 * p + 2)]


def pytorch_lists(kind: Any, p: int, m: int, chunks: Chunks) -> list[list[Action]]:
    """PyTorch's lists, whose waits are left out, in our words. Its class asks for process groups: what makes a list of
    (p, m) is called without them."""
    schedule = object.__new__(kind)
    schedule.pp_group_size, schedule._n_microbatches = p, m
    schedule.n_local_stages, schedule.num_stages = chunks.each, chunks.last + 1
    schedule.number_of_rounds = max(1, m // p)
    schedule.microbatches_per_round = m // schedule.number_of_rounds
    found = []
    for rank in range(p):
        numbers = chunks.of_stage(rank)
        actions = [action for action in schedule._calculate_single_rank_operations(rank) if action is not None]
        found.append(
            [
                KINDS[action.computation_type.value](action.microbatch_index, numbers.index(action.stage_index))
                for action in actions
            ]
        )
    return found


@pytest.mark.parametrize(("p", "m"), [*SIZES, (2, 2), (4, 4), (4, 6)])
def test_zb_h1_is_pytorchs_list(p: int, m: int) -> None:
    theirs = pytorch_lists(ScheduleInterleavedZeroBubble, p, m, Chunks(p))
    assert [SCHEDULES["zb-h1"](p, stage, m, 1) for stage in range(p)] == theirs
    assert counted_bubble(slots_of(theirs)) == bubble("zb-h1").at(p=p, m=m)
    assert [max(live(actions), key=lambda counts: (counts.total, counts.whole)) for actions in theirs] == [
        (p - stage, stage) for stage in range(p)
    ]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_v_is_pytorchs_list(p: int, m: int) -> None:
    chunks = Chunks(p, 2, turns_back=True)
    theirs = pytorch_lists(ScheduleZBVZeroBubble, p, m, chunks)
    assert [SCHEDULES["zb-v"](p, stage, m, 2) for stage in range(p)] == theirs
    assert counted_bubble(slots_of(theirs, chunks)) == bubble("zb-v").at(p=p, m=m)
    assert [max(counts.total for counts in live(actions)) for actions in theirs] == [2 * p] * p


@pytest.mark.parametrize(
    ("p", "m", "v"), [(2, 4, 2), (4, 8, 3), (4, 6, 2), (4, 10, 2), (3, 5, 4), (5, 12, 2), (8, 15, 3)]
)
def test_interleaved_is_pytorchs_list(p: int, m: int, v: int) -> None:
    """In rounds of p microbatches, and of more where p does not divide them."""
    theirs = pytorch_lists(ScheduleInterleaved1F1B, p, m, Chunks(p, v))
    assert [SCHEDULES["interleaved"](p, stage, m, v) for stage in range(p)] == theirs
