"""The grader's verdicts on schedules of pipelines: what is kept, what waits, and a deadlock in words, at once."""

from __future__ import annotations

from typing import Any

import pytest
from grading_here import grade

from zerosim.grading import Action, Backward, Forward, InputGrad, WeightGrad, find_exercise
from zerosim.parallel.pipeline import gpipe


def one_at_a_time(num_stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[Action]:
    return [way(slot) for slot in range(micro_batches) for way in (Forward, Backward)]


def last_first(num_stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[Action]:
    forwards = [Forward(slot) for slot in range(micro_batches)]
    return [*forwards, *(Backward(action.slot) for action in reversed(forwards))]


@pytest.mark.slow
def test_gpipe_keeps_too_many() -> None:
    found = grade(gpipe, "one_f_one_b")
    assert [check.name for check in found.failures] == ["live"]
    check = found["live"]
    assert "at most min(m, p-i) microbatches live: 4, 3, 2, 1 on stages 0 to 3" in check.expected
    assert check.counted == "8, 8, 8, 8"
    assert "all forwards first is GPipe" in check.hint
    assert check.where is not None
    assert (check.where.rank, "microbatch 4" in check.where.text) == (0, True)  # the fifth of four
    assert found.points == 0


@pytest.mark.slow
def test_one_micro_batch_at_a_time_waits_too_long() -> None:
    found = grade(one_at_a_time, "one_f_one_b")
    assert [check.name for check in found.failures] == ["bubble"]
    assert (found["live"].counted, found["bubble"].counted) == ("1, 1, 1, 1", "3")
    assert found.points == 0


@pytest.mark.slow
def test_gradients_that_are_added_in_another_order_have_other_bits() -> None:
    found = grade(last_first, "one_f_one_b")
    assert {check.name for check in found.failures} == {"losses", "live"}
    assert "in the order of the backwards" in found["losses"].hint


def test_a_deadlock_is_told_at_once_and_names_the_two_stages() -> None:
    """Not after the patience for an answer that does nothing, which has other words."""
    found = grade(find_exercise("bug_rounds").given, "bug_rounds")
    assert found.points == 0
    check = found["runs"]
    assert check.case == "3 stages, 7 microbatches"
    assert check.counted == (
        "deadlock: stage 0 waits for stage 1 to go back with microbatch 2; "
        "stage 1 waits for stage 0 to go forward with microbatch 3"
    )
    assert check.where is not None
    assert check.where.rank == 0
    assert "microbatch 2" in check.where.text


def mixed(num_stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[Action]:
    """The last stage sends back what the first, still going forward, does not take."""
    return (one_at_a_time if stage == num_stages - 1 else gpipe)(num_stages, stage, micro_batches)


def differing(num_stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[Action]:
    return (last_first if stage else gpipe)(num_stages, stage, micro_batches)


def nothing(num_stages: int, stage: int, micro_batches: int, chunks: int = 1) -> None: ...


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("answer", "words", "hint"),
    [
        (mixed, "to take what it has sent forward with microbatch", "write both lists down"),
        (differing, "recv microbatch 0 back into chunk 0", "in the same order"),
        (nothing, "its schedule gave a NoneType, expected a list of actions", "returns one stage's list"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_wrong_with_a_schedule_is_said(answer: Any, words: str, hint: str) -> None:
    check = grade(answer, "one_f_one_b")["runs"]
    assert check.passed is False
    assert words in check.counted
    assert hint in check.hint


def cut_in_two(num_stages: int, stage: int, micro_batches: int) -> list[Action]:
    """1F1B with input gradients alone."""
    ahead = num_stages - stage - 1
    actions: list[Action] = [Forward(slot) for slot in range(ahead)]
    for slot in range(micro_batches):
        actions += [Forward(slot + ahead)] if slot + ahead < micro_batches else []
        actions += [InputGrad(slot)]
    return actions


def all_at_the_end(num_stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[Action]:
    return cut_in_two(num_stages, stage, micro_batches) + [WeightGrad(slot) for slot in range(micro_batches)]


def each_at_once(num_stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[Action]:
    own = [[action] for action in cut_in_two(num_stages, stage, micro_batches)]
    return [one for turn in own for one in (turn + [WeightGrad(turn[0].slot)] * isinstance(turn[0], InputGrad))]


def one_short(num_stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[Action]:
    return all_at_the_end(num_stages, stage, micro_batches)[:-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "failed", "counted"),
    [(all_at_the_end, "live", "8, 8, 8, 8"), (each_at_once, "bubble", "1/4"), (one_short, "runs", "is missing")],
)
def test_weight_gradients_that_wait_too_long_or_not_at_all(answer: Any, failed: str, counted: str) -> None:
    found = grade(answer, "zb_h1")
    assert failed in [check.name for check in found.failures]
    assert counted in found[failed].counted
    assert found.points == 0
