"""The grader's verdicts: unsolved is unsolved, every seeded bug is named with rank and event, no strategy hangs it.

Answers are judged in this process, which is quick. That `grade` judges them in another one, and what only that
can hold, is in test_grading_apart.py.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from grading_here import Own2, Own3, grade

from zerosim.device.device import Kind
from zerosim.device.events import Alloc, Event, Free, Kernel, Launch
from zerosim.errors import InputError
from zerosim.grading import (
    EXERCISES,
    Exercise,
    Flat,
    Grade,
    Slice,
    Strategy,
    Unit,
    Zero2,
    Zero3,
    find_exercise,
    step_into,
)
from zerosim.grading.limits import BoundedRecorder, Endless
from zerosim.grading.own_code import line_of_frame
from zerosim.parallel.ddp import DDP
from zerosim.parallel.exchange import KeepSlice
from zerosim.parallel.reducer import InBuckets
from zerosim.parallel.zero1 import Zero1

SKELETONS = [one for one in EXERCISES if not one.name.startswith("bug_")]
BUGS = [one for one in EXERCISES if one.name.startswith("bug_")]
NAMES = dict(ids=lambda one: one.name)


@cache
def as_given(name: str) -> Grade:
    """Of an exercise as it is handed out."""
    exercise = find_exercise(name)
    return grade(exercise.given, exercise)


# -- exercises --------------------------------------------------------------------------------------
def test_exercises_are_numbered_named_and_hinted() -> None:
    assert [one.number for one in EXERCISES] == list(range(1, len(EXERCISES) + 1))
    assert len({one.name for one in EXERCISES}) == len(EXERCISES) == len(SKELETONS) + len(BUGS)
    assert len(SKELETONS) >= 8
    assert len(BUGS) >= 3
    for one in EXERCISES:
        assert len(one.hints) >= 2
        assert one.hint(2) == one.hints[1]
        assert one.skeleton.startswith(("class ", "def "))
        with pytest.raises(InputError, match="hints 1 to"):
            one.hint(9)


def test_an_unknown_exercise_names_the_nearest() -> None:
    assert find_exercise(6) is find_exercise("zero3")
    with pytest.raises(InputError, match="did you mean zero3"):
        grade(Strategy, "zero33")
    with pytest.raises(InputError, match=f"expected 1 to {len(EXERCISES)} or one of bounds"):
        grade(Strategy, 99)


@pytest.mark.quick(1)
@pytest.mark.parametrize("exercise", SKELETONS, **NAMES)
def test_a_skeleton_is_unsolved_and_says_what_is_to_be_written(exercise: Exercise) -> None:
    found = as_given(exercise.name)
    assert found.state == "unsolved"
    assert not found.passed
    assert found.points == 0
    text = str(found)
    assert "not solved yet" in text
    assert "To write: " in text
    assert "skeletons.py, line " in text
    assert exercise.hint(1) in text
    assert "Traceback" not in text
    assert "not solved yet" in found._repr_html_()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "answer"), [("ddp", DDP), ("zero1", Zero1), ("zero2", Zero2), ("zero3", Zero3), ("tied", Zero3)]
)
def test_the_packages_own_strategies_pass_every_check_and_are_nobodys_answer(name: str, answer: Any) -> None:
    found = grade(answer, name)
    assert all(check.passed for check in found.checks), str(found)
    assert found.state == "failed"
    assert found.points == 0
    assert ", zerosim's own, did the work: write it yourself" in str(found).splitlines()[0]


TWICE = [pytest.param(one, marks=() if one.number % 3 == 1 else pytest.mark.slow) for one in EXERCISES]


@pytest.mark.quick(1)
@pytest.mark.parametrize("exercise", TWICE, **NAMES)
def test_grading_is_always_the_same(exercise: Exercise) -> None:
    first = as_given(exercise.name)
    again = grade(exercise.given, exercise)
    assert str(again) == str(first)
    assert again._repr_html_() == first._repr_html_()


# -- seeded bugs: the check, the rank, the event ----------------------------------------------------
def bug(name: str) -> Any:
    found = as_given(name)
    assert (found.state, found.points) == ("failed", 0)
    return found


def event_of(check: Any, exercise: str, kind: type) -> Any:
    """The event that a check points to, of that kind: its number is that of the rank's record in that case."""
    from zerosim.grading.trial import attempt

    one = find_exercise(exercise)
    case = next(case for case in one.cases if case.label == check.case)
    event = attempt(case.config, one.adapt(one.given)).records[check.where.rank][check.where.number]
    assert isinstance(event, kind), event
    return event


@pytest.mark.slow
def test_thrifty_holds_two_units_from_the_second_gather_on() -> None:
    found = bug("bug_thrifty")
    assert [check.name for check in found.failures] == ["bytes", "gathered"]
    check = found["gathered"]
    assert check.where.rank == 0
    event = event_of(check, "bug_thrifty", Alloc)
    assert (event.kind, event.scope.phase, event.scope.unit) == ("unsharded_param", "forward", "wpe")
    live = [held.unit for held in check.where.live if held.kind == "unsharded_param"]
    assert live == ["wte", "wpe"]
    assert str(found).splitlines()[0].endswith(": nothing counts without bytes and gathered")
    assert found["bytes"].where.text.startswith("mark end_of_backward")
    assert found["weights"].passed


@pytest.mark.slow
def test_mean_is_seen_to_divide_once_more() -> None:
    found = bug("bug_mean")
    check = found["weights"]
    assert [one.name for one in found.failures] == ["weights"]
    assert "rank 0's gradient of lm_head in step 0 is 0.25 times the reference's" in check.counted
    assert "divided by the number of ranks twice" in check.hint
    event = event_of(check, "bug_mean", Kernel)
    assert (event.name, event.scope.phase, event.scope.unit) == ("divide", "backward", "lm_head")


@pytest.mark.slow
def test_shared_is_seen_to_reduce_the_table_at_its_first_use() -> None:
    found = bug("bug_shared")
    assert {check.name for check in found.failures} == {"weights", "volume", "calls"}
    assert "gradient of wte" in found["weights"].counted
    for name in ("volume", "calls"):
        event = event_of(found[name], "bug_shared", Launch)
        assert (event.op, event.scope.phase, event.scope.unit) == ("reduce_scatter", "backward", "lm_head")


def test_hasty_is_shown_where_it_freed_the_table() -> None:
    found = bug("bug_hasty")
    check = found["runs"]
    assert "in step 0, backward of lm_head" in check.counted
    assert "wte.weight while wte is sharded" in check.counted
    event = event_of(check, "bug_hasty", Free)
    assert (event.scope.phase, event.scope.unit) == ("forward", "lm_head")
    assert not [held for held in check.where.live if held.kind == "unsharded_param"]
    assert [one.passed for one in found.checks[1:]] == [None] * 4


@pytest.mark.slow
def test_patient_misses_an_addition_before_it_reduces() -> None:
    found = bug("bug_patient")
    check = found["weights"]
    assert check.case == "4 ranks, 3 microbatches"
    assert "runs accumulate 3 times, the reference's 4 times" in check.counted
    assert "microbatches" in check.hint
    event = event_of(check, "bug_patient", Launch)
    assert (event.op, event.scope.unit, event.scope.slot) == ("reduce_scatter", "lm_head", 2)


@pytest.mark.slow
def test_sparing_names_the_rank_that_did_not_join() -> None:
    found = bug("bug_sparing")
    check = found["runs"]
    assert check.where.rank == 5
    assert "rank 5 calls reduce_scatter of 2,664 B in step 0, backward of h.0" in check.counted
    assert "where rank 0 calls reduce_scatter of 48 B in step 0, backward of ln_f" in check.counted
    assert check.hint.endswith("differs on rank 5 and on rank 0")
    assert "bugs.py, line" in check.line
    assert event_of(check, "bug_sparing", Launch).scope.unit == "h.0"


# -- wrong answers to the other exercises -----------------------------------------------------------
@pytest.mark.slow
def test_a_norm_of_each_ranks_own_is_seen() -> None:
    class Alone(Zero2):
        def reduce_grad_norm(self) -> float | None:
            from zerosim.optim.precision import norm_partials, total_norm

            squares = norm_partials(self.device, self.flats, self.comm.size)
            return self.updater.decide(total_norm(self.device, squares))

    found = grade(Alone, "clipping")
    assert {"norm", "weights"} <= {check.name for check in found.failures}
    assert "ALL ranks" in found["weights"].hint
    assert "is multiplied by" in found["weights"].counted


@pytest.mark.slow
def test_a_norm_that_is_wrong_in_a_later_step_is_seen() -> None:
    class Later(Zero2):
        def reduce_grad_norm(self) -> float | None:
            self.sees_all_grads = self.device.where.step == 1
            return super().reduce_grad_norm()

    assert grade(Later, "clipping")["norm"].passed is False


@pytest.mark.slow
def test_gathers_that_are_not_ahead_are_seen() -> None:
    found = grade(Zero3, "prefetch")
    assert [check.name for check in found.failures] == ["overlap"]
    assert found["overlap"].counted.startswith("0 on rank 0; late: in forward wpe, h.0")
    assert str(found).splitlines()[0].endswith(": nothing counts without overlap")
    assert found["overlap"].where.text.startswith("all_gather")
    assert "forward of wpe" in found["overlap"].where.text


@pytest.mark.slow
def test_a_slice_of_the_wrong_place_is_seen() -> None:
    class First(Zero2):
        def post_backward(self, unit: Unit) -> None:
            if unit.reduces:
                unit.flat.add_grad_shard(self.comm.all_reduce(unit.flat.take_grad()))

    found = grade(First, "zero2")
    assert "has 12,288 elements" not in found["weights"].counted
    assert "elements where its slice has" in found["weights"].counted
    assert "rank 1's gradient" in found["weights"].counted
    assert found["volume"].passed is False
    assert found["bytes"].passed is False


def test_bounds_that_raise_are_shown_with_their_line() -> None:
    broken = grade(lambda numel, rank, world_size: 1 // 0, "bounds")
    assert "ZeroDivisionError" in broken["slices"].counted
    assert "test_grading.py, line" in broken["slices"].line


@pytest.mark.slow
def test_an_all_reduce_with_memory_of_its_own_is_above_the_peak() -> None:
    def all_reduce(comm: Any, grad: Any) -> None:
        comm.all_gather(comm.reduce_scatter(grad), out=grad)

    found = grade(all_reduce, "all_reduce")
    assert found["weights"].passed
    assert [check.name for check in found.failures] == ["peak"]


@pytest.mark.slow
def test_an_all_reduce_that_is_called_is_not_made_of_its_halves() -> None:
    found = grade(lambda comm, grad: comm.all_reduce(grad), "all_reduce")
    assert [check.name for check in found.failures] == ["halves"]
    assert str(found).splitlines()[0].endswith(": nothing counts without halves")
    assert found["halves"].counted == "rank 0 calls all_reduce of 12,288 B in step 0, backward of lm_head"
    assert found["halves"].where is not None
    assert found["halves"].where.text.startswith("all_reduce #0 of 12,288 B")
    hidden = grade(lambda comm, grad: comm.all_reduce(grad, purpose="control"), "all_reduce")
    assert hidden["halves"].passed is False

    def beside(comm: Any, grad: Any) -> None:
        size = grad.numel // comm.size
        own = grad[comm.rank * size : (comm.rank + 1) * size]
        comm.all_gather(own, out=grad)
        comm.device.kernel(grad.numel, comm.device.backend.multiply, grad.array, 0.5, grad.array)

    one_half = grade(beside, "all_reduce")
    assert one_half["halves"].counted == "rank 0 calls no reduce_scatter in step 0, backward of lm_head"


def test_a_mean_that_is_returned_is_said_to_be_lost() -> None:
    def rebound(comm: Any, grad: Any) -> None:
        grad = comm.all_gather(comm.reduce_scatter(grad))

    def half(comm: Any, grad: Any) -> Any:
        size = grad.numel // comm.size
        own = grad[comm.rank * size : (comm.rank + 1) * size]
        return comm.all_gather(comm.reduce_scatter(grad, out=own))

    returned = grade(lambda comm, grad: comm.all_gather(comm.reduce_scatter(grad)), "all_reduce")
    for found, words in (
        (returned, "grad was unchanged when all_reduce returned a Buffer"),
        (grade(rebound, "all_reduce"), "grad was unchanged when all_reduce returned"),
        (grade(half, "all_reduce"), "grad is not what all_reduce returned"),
    ):
        assert found["runs"].counted.endswith(words), str(found)
        assert found["runs"].hint.startswith("change `grad` in place")


def test_an_all_reduce_may_return_the_gradient_it_changed() -> None:
    def all_reduce(comm: Any, grad: Any) -> Any:
        size = grad.numel // comm.size
        own = grad[comm.rank * size : (comm.rank + 1) * size]
        return comm.all_gather(comm.reduce_scatter(grad, out=own), out=grad)

    assert grade(all_reduce, "all_reduce").passed


@pytest.mark.slow
def test_traffic_beyond_the_papers_is_seen_where_it_begins() -> None:
    """DeepSpeed's default: all_reduce, then drop all but the slice. Buckets put calls off; that is no difference."""

    class AllReduced(Zero1):
        def default_reducer(self, comm: Any) -> InBuckets:
            return InBuckets(KeepSlice(), comm.bucket_bytes)

    found = grade(AllReduced, "zero1")
    assert [check.name for check in found.failures] == ["volume"]
    assert found["volume"].where is not None
    assert found["volume"].where.text.startswith("all_reduce #0 of 12,288 B")
    assert "6 all_reduce in step 0, the reference 6 reduce_scatter" in found["volume"].counted
    assert "a rank needs its slice: use reduce_scatter" in found["volume"].hint


@pytest.mark.slow
def test_another_repair_is_as_good() -> None:
    class KeptForBackward(find_exercise("bug_hasty").given):  # type: ignore[misc]
        def post_forward(self, unit: Unit) -> None:
            if unit.name not in ("wte", "lm_head"):
                unit.flat.reshard()

    assert grade(KeptForBackward, "bug_hasty").passed


@pytest.mark.slow
def test_one_can_step_to_where_a_grade_points() -> None:
    exercise = find_exercise("bug_thrifty")
    found = grade(exercise.given, exercise)["gathered"].where
    assert found is not None
    with step_into(exercise.given, exercise) as world:
        moment = world.next(rank=found.rank, count=found.number + 1)
        assert moment.text == found.text
        live = world.ranks[found.rank].live()
    assert [(one.kind, one.nbytes, one.born) for one in live] == [
        (one.kind, one.nbytes, one.born) for one in found.live
    ]
    with pytest.raises(InputError, match="cases 0 to 1"):
        step_into(exercise.given, exercise, case=2)
    with pytest.raises(InputError, match="is not a strategy"):
        step_into(3, exercise)


@pytest.mark.slow
def test_a_check_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="no check 'speed' in this grade; choose one of runs, weights"):
        grade(Zero2, "zero2")["speed"]


# -- the notebook -----------------------------------------------------------------------------------
NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
def test_a_notebook_holds_every_exercise_as_it_is_given() -> None:
    every = [cell for path in NOTEBOOKS for cell in json.loads(path.read_text("utf-8"))["cells"]]
    cells = [cell for cell in every if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    for one in EXERCISES:
        assert one.skeleton.strip() in sources, one.name
        call = f'grade({one.given.__name__}, "{one.name}")'
        shown = [cell for cell, source in zip(cells, sources, strict=True) if source == call]
        text = "".join(shown[-1]["outputs"][0]["data"]["text/plain"])
        alone = [line for line in text.splitlines() if "line" not in line]  # a cell's lines are not a file's
        given = str(as_given(one.name))
        assert alone == [line for line in given.splitlines() if "line" not in line], one.name


# -- strategies that do not behave ------------------------------------------------------------------
class Deadlocking(Zero3):
    """Rank 2 leaves after the last collective that the others still wait in."""

    def step(self) -> None:
        super().step()
        if self.comm.rank != 2 and self.device.where.step == 1:
            self.comm.barrier()


class Skipping(Zero2):
    def publish_params(self, flat: Flat) -> None:
        if self.comm.rank != 1 or flat.name != "lm_head" or self.device.where.step == 0:
            super().publish_params(flat)


class Unreduced(Zero2):
    """Rank 0 goes past every reduction: when the run ends, one rank has come there beside it."""

    def post_backward(self, unit: Unit) -> None:
        if self.comm.rank != 0:
            super().post_backward(unit)
        elif unit.reduces:
            unit.flat.take_grad()
            unit.flat.add_grad_shard(unit.flat.new_grad_shard())


class Hermit(Zero2):
    """Rank 0 alone gathers: it is right, and the others go on."""

    def publish_params(self, flat: Flat) -> None:
        if self.comm.rank == 0:
            super().publish_params(flat)


class Waiting(Zero3):
    """Rank 1 alone waits, when the others have ended."""

    def step(self) -> None:
        super().step()
        if self.comm.rank == 1 and self.device.where.step == 1:
            self.comm.barrier()


class Raising(Zero3):
    def post_forward(self, unit: Unit) -> None:
        if unit.name == "h.1" and self.comm.rank == 2:
            raise KeyError("my mistake")
        super().post_forward(unit)


class Spinning(Zero3):
    def pre_backward(self, unit: Unit) -> None:
        while unit.name == "h.0":
            pass
        super().pre_backward(unit)


class SpinningLast(Zero3):
    """When everybody else has finished, nobody waits for it."""

    def step(self) -> None:
        super().step()
        while self.comm.rank == 3 and self.device.where.step == 1:
            pass


class Gathering(Zero3):
    def post_forward(self, unit: Unit) -> None:
        while True:
            self.comm.all_gather(unit.flat.shard())


class Swallowing(Zero3):
    def post_forward(self, unit: Unit) -> None:
        while True:
            with contextlib.suppress(Exception):
                self.comm.all_gather(unit.flat.shard())


class Hoarding(Zero3):
    def post_forward(self, unit: Unit) -> None:
        held = []
        while True:
            held.append(self.device.alloc((4,), unit.flat.dtype, Kind.TEMP))


class FreeingTooMuch(Zero3):
    def pre_forward(self, unit: Unit) -> None:
        super().pre_forward(unit)
        if unit.name == "h.1":
            unit.flat.reshard()


class TooShort(Zero3):
    def pre_forward(self, unit: Unit) -> None:
        unit.flat.unshard(unit.flat.shard())


class Unpadded(Zero2):
    def padded(self, flat: Flat) -> int:
        return flat.numel


class Forgetful(Zero2):
    def post_backward(self, unit: Unit) -> None:
        if unit.name != "h.0":
            super().post_backward(unit)


class Uncalled(Strategy):
    def __init__(self) -> None: ...


class Unwaited(Zero3):
    def pre_forward(self, unit: Unit) -> None:
        unit.flat.unshard(self.comm.launch_all_gather(unit.flat.shard()))  # type: ignore[arg-type]


class Misspelt(Zero3):
    def post_forward(self, unit: Unit) -> None:
        unit.flat.reshrad()  # type: ignore[attr-defined]


class WithoutSuper(Zero3):
    def __init__(self, *parts: Any) -> None:
        self.mine = parts


class Leaving(Zero3):
    def post_forward(self, unit: Unit) -> None:
        raise SystemExit(3)


class Sharing(Zero3):
    coming: dict[str, Any] = {}  # noqa: RUF012  the mistake: one dict for all ranks

    def pre_forward(self, unit: Unit) -> None:
        buffer = self.coming.setdefault(unit.name, self.comm.all_gather(unit.flat.shard()))
        unit.flat.unshard(buffer)
        self.comm.all_reduce(buffer)


class OutOfRange(Zero3):
    def owned(self, flat: Flat) -> Slice:
        return Slice(0, self.comm.rank, flat.numel)


BAD = [
    (Deadlocking, "zero3", 2, "; ranks 0-1, 3 wait for ever", "same collectives"),
    (Skipping, "zero2", 1, "rank 1 calls", "same collectives"),
    (
        Unreduced,
        "zero2",
        0,
        "where rank 1 calls reduce_scatter of 12,288 B in step 0, backward of lm_head",
        "on rank 0",
    ),
    (Hermit, "zero2", None, "where rank 0 calls all_gather of 12,288 B in step 0, optimizer", "and on rank 0"),
    (Waiting, "zero3", 1, "where ranks 0, 2-3 call nothing more; rank 1 waits for ever", "same collectives"),
    (Raising, "zero3", 2, "in step 0, forward of h.1: KeyError: 'my mistake'", ""),
    (Spinning, "zero3", None, "did nothing for 1.5 s, in backward of h.0", "loop"),
    (SpinningLast, "zero3", 3, "rank 3 did nothing for 1.5 s", "loop"),
    (Gathering, "zero3", None, "no end is in sight", "loop"),
    (Swallowing, "zero3", None, "no end is in sight", "loop"),
    (Hoarding, "zero3", None, "no end is in sight", "loop"),
    (FreeingTooMuch, "zero3", None, "forward of h.1: RuntimeError", "freed before its last use"),
    (TooShort, "zero3", None, "wte is used with 1,536 of its 6,144 elements", "wrong number of elements"),
    (Unpadded, "zero2", None, "reduce_scatter of bf16", "wrong number of elements"),
    (Forgetful, "zero2", None, "h.0 reaches its update with no gradient", "grad_shard"),
    (Uncalled, "zero2", None, "TypeError", "keep the arguments"),
    (Unwaited, "zero3", None, "'Work' object", "its wait() gives the buffer"),
    (Misspelt, "zero3", None, "no attribute 'reshrad'", "did you mean reshard"),
    (WithoutSuper, "zero3", None, "no attribute", "super().__init__"),
    (Leaving, "zero3", None, "SystemExit: 3", "return from the hook instead"),
    (Sharing, "zero3", None, "lies on rank", "store a rank's own data in self"),
    (OutOfRange, "zero3", None, "", ""),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("answer", "exercise", "rank", "words", "hint"), BAD, ids=lambda x: getattr(x, "__name__", ""))
def test_a_bad_strategy_ends_in_words(answer: Any, exercise: str, rank: int | None, words: str, hint: str) -> None:
    found = grade(answer, exercise)
    assert found.state == "failed"
    check = found["runs"]
    assert check.passed is False
    assert words in check.counted, check.counted
    assert hint in check.hint, check.hint
    assert check.where is not None
    if rank is not None:
        assert check.where.rank == rank
    assert "Traceback" not in str(found)
    assert "\n" not in check.counted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_ends_for_doing_too_much_is_not_said_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the rank takes to end, as on a busy machine; what swallows every error does go on. (What ends it may
    arrive in a callback of Python's own, which reports and drops it; it is sent again.)"""

    class Slow(BoundedRecorder):
        def add(self, event: Event) -> None:
            try:
                super().add(event)
            except Endless:
                time.sleep(0.3)
                raise

    with monkeypatch.context() as patched:
        patched.setattr("zerosim.grading.trial.BoundedRecorder", Slow)
        assert "no end is in sight" in grade(Gathering, "zero3")["runs"].counted

    class Stubborn(Zero3):
        def post_forward(self, unit: Unit) -> None:
            for _ in range(200_000):
                with contextlib.suppress(BaseException):
                    self.device.mark("again")

    check = grade(Stubborn, "zero3")["runs"]
    assert "did more than 10,000 events a step and goes on" in check.counted
    assert "loop" in check.hint


def test_one_rank_alone_may_be_right() -> None:
    class Skips(Zero2):
        def publish_params(self, flat: Flat) -> None:
            if self.comm.rank == 0 or self.device.where.step == 0 or flat is not self.flats[-1]:
                super().publish_params(flat)

    assert grade(Skips, "zero2")["runs"].counted == (
        "deadlock: ranks 1-3 call nothing more, where rank 0 calls all_gather of 12,288 B in step 1, optimizer; "
        "rank 0 waits for ever"
    )


@pytest.mark.slow
def test_bounds_that_never_come_are_ended() -> None:
    def slice_of(numel: int, rank: int, world_size: int) -> tuple[int, int]:
        start = 0
        while start < numel:
            pass
        return start, numel

    def slow(numel: int, rank: int, world_size: int) -> tuple[int, int]:
        time.sleep(0.2)
        return 0, 0

    def leaving(numel: int, rank: int, world_size: int) -> tuple[int, int]:
        raise SystemExit(3)

    found = grade(slice_of, "bounds")
    assert found.state == "failed"
    check = found["slices"]
    assert check.counted == "slice_of(12, 0, 4) did nothing for 1.5 s"
    assert "test_grading.py, line" in check.line
    assert check.line.endswith(("while start < numel:", "pass"))
    assert "loop" in check.hint
    assert "slice_of(12, 3, 4), the last rank's, is (0, 0)" in grade(slow, "bounds")["slices"].counted
    assert "raised SystemExit: 3" in grade(leaving, "bounds")["slices"].counted


@pytest.mark.slow
def test_the_students_own_line_is_named() -> None:
    assert grade(Raising, "zero3")["runs"].line.endswith('raise KeyError("my mistake")')
    assert grade(Spinning, "zero3")["runs"].line.startswith("test_grading.py, line ")
    assert "padded" not in grade(Unpadded, "zero2")["runs"].line


def test_a_frame_that_is_being_entered_is_named_by_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerosim.grading.own_code.walk_stack", lambda frame: [(frame, None)])
    assert line_of_frame(sys._getframe()).startswith("test_grading.py, line ")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "answer", [None, 3, "zero2", dict, Zero2.__mro__[-1], lambda: 0, test_the_students_own_line_is_named]
)
def test_what_is_no_strategy_is_refused_in_words(answer: Any) -> None:
    found = grade(answer, "zero2")
    assert found.state == "failed"
    assert "is not a strategy: hand in the class itself" in str(found)
    assert "is not a function" in str(grade(Zero2, "all_reduce"))


def test_a_grade_is_safe_html() -> None:
    class Marked(Zero3):
        def pre_forward(self, unit: Unit) -> None:
            raise ValueError("<script>alert(1)</script>")

    html = grade(Marked, "zero3")._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


class KeepsParams(Own3):
    keeps_params = True


class KeepsGrads(Own2):
    keeps_grads = True

    def post_backward(self, unit: Unit) -> None:
        if unit.reduces:
            unit.flat.add_grad_whole(unit.flat.take_grad())
            unit.flat.grad_shard = self.comm.reduce_scatter(unit.flat.whole_grad())


class KeepsGathered(Own3):
    def post_forward(self, unit: Unit) -> None: ...


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("answer", "name", "check", "excess", "hint"),
    [
        (KeepsParams, "zero3", "bytes", "6Ψ/N too many", "set keeps_params = False in your class"),
        (KeepsGrads, "zero2", "bytes", "8Ψ/N too many", "set keeps_grads = False in your class"),
        (KeepsGathered, "zero3", "peak", "5.38Ψ/N too many", "flat.reshard() in post_forward"),
    ],
)
def test_an_excess_is_in_shares_and_its_cause_by_name(
    answer: Any, name: str, check: str, excess: str, hint: str
) -> None:
    first = grade(answer, name).failures[0]
    assert first.name == check
    assert excess in first.counted
    assert hint in first.hint


def test_a_misspelt_name_brings_no_table() -> None:
    class Misspelt(Own3):
        def post_forward(self, unit: Unit) -> None:
            unti.flat.reshard()  # type: ignore[name-defined]  # noqa: F821

    text = str(grade(Misspelt, "zero3"))
    assert "NameError" in text
    assert "live:" not in text
