"""A point means something: wrong weights, the work of others, a bug that is still there, a forged record earn none."""

from __future__ import annotations

import _thread
import dataclasses
import gc
import importlib.util
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grading_here import Own2, Own3, grade

from zerosim.device.allocators import arena
from zerosim.device.device import Kind
from zerosim.device.recorder import Recorder
from zerosim.errors import InputError
from zerosim.grading import EXERCISES, Flat, Slice, Strategy, Unit, Zero2, Zero3, find_exercise
from zerosim.grading.borrowed import _owners, noted
from zerosim.grading.bounds import wrong as wrong_bounds
from zerosim.grading.trial import attempt
from zerosim.parallel.zero1 import Zero1
from zerosim.placement import partition
from zerosim.tensor import flat as tensor_flat
from zerosim.tensor.flat import slice_of, slice_size


# -- points -----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_wrong_weights_leave_no_point_to_the_other_checks() -> None:
    class Half(Own2):
        def post_backward(self, unit: Unit) -> None:
            super().post_backward(unit)
            shard = unit.flat.grad_shard
            if shard is not None:
                self.device.kernel(0, self.device.backend.multiply, shard.array, 0.5, shard.array)

    found = grade(Half, "zero2")
    assert [check.name for check in found.failures] == ["weights"]
    assert found.points == 0
    assert str(found).splitlines()[0] == "Exercise 5, ZeRO-2: 0 of 6 points: the weights are wrong"
    assert "the weights are wrong" in found._repr_html_()


@pytest.mark.slow
def test_a_right_answer_that_takes_too_much_keeps_its_other_points() -> None:
    class ReducesFirst(Own3):
        def post_backward(self, unit: Unit) -> None:
            unit.flat.add_grad_shard(self.comm.reduce_scatter(unit.flat.take_grad()))
            unit.flat.reshard()

    found = grade(ReducesFirst, "zero3")
    assert [check.name for check in found.failures] == ["peak"]
    assert found.points == found.possible - 1
    assert "reshard before the gradient is reduced" in found["peak"].hint
    assert found["peak"].case == "2 ranks, a slice half as long as its unit"


@pytest.mark.slow
def test_fewer_bytes_than_the_stage_has_are_another_stage() -> None:
    class Gathers(Own3):
        """ZeRO-3, where ZeRO-2 was asked for."""

    check = grade(Gathers, "zero2")["bytes"]
    assert check.passed is False
    assert check.counted == "107,616 B, 6Ψ/N too few, on rank 0"
    assert check.hint == "a buffer that must live until the step was freed too early"


# -- somebody else's work ---------------------------------------------------------------------------
class Inherits(Zero2): ...


class Gives(Strategy):
    def __new__(cls, *parts: Any) -> Any:
        return Zero2(*parts)


class Delegates(Own2):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self.inner = Zero2(*parts)

    def post_backward(self, unit: Unit) -> None:
        self.inner.post_backward(unit)


class Calls(Own2):
    def post_backward(self, unit: Unit) -> None:
        Zero2.post_backward(self, unit)  # type: ignore[arg-type]


class InheritsHalf(Zero1):
    """Its gradients are its own work, its parameters are spread by ZeRO-1, as ZeRO-2 does."""

    keeps_grads = False
    post_backward = Own2.post_backward  # type: ignore[assignment]


class CallsReducer(Zero2):
    def post_backward(self, unit: Unit) -> None:
        for flat in unit.completes:
            self.reducer.reduce(flat)


def cut_by_zerosim(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    part = slice_of(numel, rank, world_size)
    return part.start, part.stop


def size_by_zerosim(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    size = slice_size(numel, world_size)
    return rank * size, (rank + 1) * size


class InheritsArena(arena.Arena):
    def reserve(self, nbytes: int) -> int | None:  # type: ignore[override]
        super().reserve(nbytes, nbytes)
        return self.address_of(nbytes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "exercise", "words"),
    [
        (InheritsArena, "best_fit", "Arena.reserve"),
        (Inherits, "zero2", "Zero2.post_backward and Zero2.publish_params"),
        (Gives, "zero2", "Zero2.post_backward and Zero2.publish_params"),
        (Delegates, "zero2", "Zero2.post_backward"),
        (Calls, "zero2", "Zero2.post_backward"),
        (InheritsHalf, "zero2", "Zero1.publish_params"),
        (CallsReducer, "accumulation", "AtOnce.reduce"),
        (Inherits, "accumulation", "Zero2.post_backward"),
        (Inherits, "clipping", "Stage.reduce_grad_norm"),
        (Zero3, "bug_thrifty", "Stage.reduce, Zero3.post_backward and 3 more"),
        (cut_by_zerosim, "bounds", "placement.partition.slice_of and placement.partition.slice_size"),
        (size_by_zerosim, "bounds", "placement.partition.slice_size"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_zerosims_own_answer_is_nobodys(answer: Any, exercise: str, words: str) -> None:
    found = grade(answer, exercise, carried=True)
    assert found.points == 0
    assert not found.passed
    assert words in str(found).splitlines()[0]
    assert ", zerosim's own, did the work: write it yourself" in str(found).splitlines()[0]
    assert "did the work" in found._repr_html_()


# -- slice bounds that are somebody else's, however they were come by ---------------------------------
def through_wrapped(numel: int, rank: int, world_size: int) -> Any:
    function: Any = partition.slice_of
    part = getattr(function, "__wrapped__", function)(numel, rank, world_size)
    return part.start, part.stop


def out_of_a_closure(numel: int, rank: int, world_size: int) -> Any:
    cells = [cell.cell_contents for cell in partition.slice_of.__closure__ or ()]  # type: ignore[attr-defined]
    original = next(one for one in cells if getattr(one, "__name__", "") == "slice_of")
    part = original(numel, rank, world_size)
    return part.start, part.stop


def from_a_copied_module(numel: int, rank: int, world_size: int) -> Any:
    spec = importlib.util.spec_from_file_location("mine", partition.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules["mine"] = copy
    spec.loader.exec_module(copy)
    part = copy.slice_of(numel, rank, world_size)
    return part.start, part.stop


def from_its_text(numel: int, rank: int, world_size: int) -> Any:
    space = dict(vars(partition))
    exec(Path(partition.__file__).read_text("utf-8"), space)
    part = space["slice_of"](numel, rank, world_size)
    return part.start, part.stop


def from_the_garbage_collector(numel: int, rank: int, world_size: int) -> Any:
    functions = [one for one in gc.get_objects() if type(one).__name__ == "function"]
    found = [one for one in functions if one.__code__.co_filename == partition.__file__ and one.__name__ == "slice_of"]
    part = found[0](numel, rank, world_size)
    return part.start, part.stop


def by_a_partition(numel: int, rank: int, world_size: int) -> Any:
    part = partition.EvenSlices().part((numel,), 0, rank, world_size)
    return part.start, part.stop


def by_another_name(numel: int, rank: int, world_size: int) -> Any:
    size = tensor_flat.slice_size(numel, world_size)
    return rank * size, (rank + 1) * size


def behind_a_deaf_listener(numel: int, rank: int, world_size: int) -> Any:
    sys.setprofile(None)
    return from_a_copied_module(numel, rank, world_size)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "answer",
    [
        through_wrapped, out_of_a_closure, from_a_copied_module, from_its_text, from_the_garbage_collector,
        by_a_partition, by_another_name, behind_a_deaf_listener,
    ],
)  # fmt: skip
def test_zerosims_own_slices_are_nobodys_however_they_were_come_by(answer: Any) -> None:
    asked = dataclasses.replace(find_exercise("bounds"), cases=())
    found = grade(answer, asked, carried=True)
    assert found["slices"].passed, str(found)
    assert found.points == 0
    assert not found.passed
    words = "leave it out" if answer is behind_a_deaf_listener else "zerosim's own, did the work"
    assert words in str(found).splitlines()[0]


class Agrees(tuple[int, int]):
    """Equals whatever it is compared with."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class Whole(int):
    """A number that is not below and not above any other."""

    __hash__ = None  # type: ignore[assignment]
    __eq__ = __le__ = __ge__ = lambda self, other: True  # type: ignore[assignment]
    __ne__ = __lt__ = __gt__ = lambda self, other: False  # type: ignore[assignment]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "made",
    [
        lambda: Agrees((0, 1)), lambda: (Whole(0), Whole(1)), lambda: (True, True), lambda: [0, 3],
        lambda: iter((0, 3)), lambda: None,
    ],
)  # fmt: skip
def test_what_agrees_with_everything_or_is_something_else_is_no_pair(made: Any) -> None:
    check = grade(lambda numel, rank, world_size: made(), "bounds")["slices"]
    assert check.passed is False
    assert "0x" not in check.counted  # the same text each time
    assert check.hint == "return a pair of whole numbers: return start, stop"


def test_code_that_is_made_into_a_function_anew_is_noted() -> None:
    """An audit hook stays for good, so that it is asked here without one."""
    code, seen, hooks = partition.slice_of.__code__, list[str](), list[Any]()
    with noted(("slice_of",), seen.append, hooks.append):
        (hook,) = hooks
        hook("exec", (compile("def mine(): return 1", "mine.py", "exec"),))
        hook("open", ("mine.py", "r", 0))
        assert not seen
        hook("function.__new__", (code,))
        hook("exec", (compile(Path(partition.__file__).read_text("utf-8"), "mine.py", "exec"),))
    assert seen == ["placement.partition.slice_of"] * 2


def test_a_recursion_without_an_end_is_no_deaf_listener() -> None:
    def mine(numel: int, rank: int, world_size: int) -> tuple[int, int]:
        return mine(numel, rank, world_size)

    found = grade(mine, "bounds")
    assert found.verdict.void == ""
    assert "RecursionError" in found["slices"].counted


def test_a_functions_text_without_a_docstring_may_be_written_twice() -> None:
    def slice_size(numel: int, ranks: int) -> int:
        return -(-numel // ranks)

    def mine(numel: int, rank: int, world_size: int) -> tuple[int, int]:
        size = slice_size(numel, world_size)
        return rank * size, (rank + 1) * size

    assert grade(mine, dataclasses.replace(find_exercise("bounds"), cases=())).verdict.void == ""


@pytest.mark.parametrize("numel", range(1, 14))
def test_the_properties_of_slices_leave_one_cut(numel: int) -> None:
    for ranks in range(1, 8):
        right = [(part.start, part.stop) for part in (slice_of(numel, rank, ranks) for rank in range(ranks))]
        assert wrong_bounds((numel, ranks), right) is None
        for size in {1, 2, 3, numel, numel + 1} - {right[0][1]}:
            cut = [(rank * size, (rank + 1) * size) for rank in range(ranks)]
            assert wrong_bounds((numel, ranks), cut) is not None
        for at in range(ranks):
            for moved in ((0, 1), (1, 0), (-1, 0), (0, -1)):
                other = [*right]
                other[at] = (right[at][0] + moved[0], right[at][1] + moved[1])
                assert wrong_bounds((numel, ranks), other) is not None


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("cut", "counted", "hint"),
    [
        (lambda n, r, N: (r * (n // N), (r + 1) * (n // N)),
         "slice_of(10, 3, 4), the last rank's, is (6, 8): elements 8 to 9 belong to no rank", "must cover numel"),
        (lambda n, r, N: (r * -(-n // N), min(n, (r + 1) * -(-n // N))),
         "slice_of(10, 3, 4) is (9, 10), 1 elements long, and rank 0's slice is 3 long", "the same length"),
        (lambda n, r, N: (r * (n // N + 1), (r + 1) * (n // N + 1)),
         "slice_of(12, 3, 4), the last rank's, is (12, 16): slices one element shorter also cover 12", "no longer"),
        (lambda n, r, N: (r, r + 3), "slice_of(12, 1, 4) is (1, 4): it starts at 1, and rank 0 stops at 3", "overlap"),
        (lambda n, r, N: (r + 1, r + 2),
         "slice_of(12, 0, 4) is (1, 2): it starts at 1, but element 0 must come first", "rank 0 starts at 0"),
        (lambda n, r, N: (0, -1), "slice_of(12, 0, 4) is (0, -1), which stops before it starts", "from 0"),
    ],
)  # fmt: skip
def test_wrong_bounds_are_told_what_they_lack_and_not_the_solution(cut: Any, counted: str, hint: str) -> None:
    found = grade(cut, "bounds")
    assert found["slices"].counted == counted
    assert hint in found["slices"].hint
    assert "-(-numel" not in str(found)
    assert "expected (" not in str(found)


def test_what_must_be_ones_own_is_something_that_zerosim_has() -> None:
    """A name with a slip in it would be watched in vain."""
    for one in EXERCISES:
        assert all(_owners(name) for name in one.yours), one.name
        assert one.yours or set(one.decisive) > {"weights"}


@pytest.mark.slow
def test_the_skeletons_own_base_may_be_used() -> None:
    """MyTied is given a ZeRO-3; what it must write is one point of it."""

    class Mine(Zero3):
        def post_backward(self, unit: Unit) -> None:
            self.gathered.reshard(unit)
            if unit.reduces:
                self.reducer.reduce(unit.flat)

    assert grade(Mine, "tied").passed


class Forward(Zero3):
    """Prefetches in forward; so many units at a time, the one that is used among them."""

    ahead = 2

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.coming: dict[str, Any] = {}

    def use(self, flats: list[Flat]) -> None:
        for flat in flats[: self.ahead]:
            if flat.name not in self.coming:
                self.coming[flat.name] = self.comm.launch_all_gather(flat.shard())
        flats[0].unshard(self.coming.pop(flats[0].name).wait())

    def pre_forward(self, unit: Unit) -> None:
        self.use(self.flats[self.flats.index(unit.flat) :])


class BothWays(Forward):
    def pre_backward(self, unit: Unit) -> None:
        self.use(self.flats[self.flats.index(unit.flat) :: -1])


class TwoAhead(BothWays):
    ahead = 3


@pytest.mark.slow
def test_prefetch_of_two_units_takes_the_room_of_one_more() -> None:
    assert grade(BothWays, "prefetch").passed
    found = grade(TwoAhead, "prefetch")
    assert [check.name for check in found.failures] == ["peak", "gathered"]
    assert found.points == found.possible - 2


@pytest.mark.slow
def test_prefetch_in_one_direction_is_half_of_it() -> None:
    found = grade(Forward, "prefetch")
    assert [check.name for check in found.failures] == ["overlap"]
    assert found["overlap"].counted.startswith("5 on rank 0; late: in backward ln_f, h.1, h.0")
    assert found.points == 0


# -- around the collectives, and around the record --------------------------------------------------
@pytest.mark.slow
def test_parameters_that_reach_other_ranks_past_comm_are_seen() -> None:
    board: dict[tuple[str, int], Any] = {}

    class Board(Own2):
        """In the last step only: one step is enough."""

        def publish_params(self, flat: Flat) -> None:
            if self.device.where.step == 0:
                super().publish_params(flat)
                return
            board[flat.name, self.comm.rank] = np.array(flat.shard().array)
            self.comm.barrier()
            for rank in range(self.comm.size):
                start = rank * flat.own.size
                flat.whole_param().array[start : start + flat.own.size] = board[flat.name, rank]
            self.comm.barrier()

    found = grade(Board, "zero2")
    assert found["weights"].passed
    assert [check.name for check in found.failures] == ["volume"]
    assert found["volume"].counted.startswith("40,356 B, too few: at least 80,712 B must be sent; publish_params")
    assert found["volume"].hint.startswith("Some traffic or memory did not go through `self.comm` and `self.device`.")


@pytest.mark.slow
def test_parameters_that_are_kept_where_nobody_counts_are_seen() -> None:
    class Stash(Own3):
        def pre_forward(self, unit: Unit) -> None:
            super().pre_forward(unit)
            vars(self).setdefault("stash", {})[unit.name] = np.array(unit.flat.whole_param().array)

        def pre_backward(self, unit: Unit) -> None:
            whole = self.device.alloc((unit.flat.padded_numel,), unit.flat.dtype, Kind.UNSHARDED_PARAM)
            whole.array[:] = vars(self)["stash"].pop(unit.name)
            unit.flat.unshard(whole)

    found = grade(Stash, "zero3")
    assert found["weights"].passed
    assert found["volume"].passed is False
    assert "too few" in found["volume"].counted
    assert "pre_backward calls no all_gather" in found["volume"].counted
    assert "did not go through" in found["volume"].hint


class Unpublished(Own2):
    def publish_params(self, flat: Flat) -> None: ...


class PublishedOnce(Own2):
    """Not after the last step, where the weights, put together of the ranks' slices, do not show it."""

    def publish_params(self, flat: Flat) -> None:
        if self.device.where.step == 0:
            super().publish_params(flat)


class AllButOne(Own2):
    def publish_params(self, flat: Flat) -> None:
        if flat.name != "h.1":
            super().publish_params(flat)


class Unreduced(Own2):
    def post_backward(self, unit: Unit) -> None:
        own = unit.flat.own
        unit.flat.add_grad_shard(unit.flat.take_grad()[own.start : own.stop])


class KeptForBackward(Own3):
    def post_forward(self, unit: Unit) -> None: ...

    def pre_backward(self, unit: Unit) -> None:
        if unit.flat.param is None:
            super().pre_backward(unit)


class NeverResharded(Own3):
    def pre_forward(self, unit: Unit) -> None:
        if unit.flat.param is None:
            super().pre_forward(unit)

    def post_forward(self, unit: Unit) -> None: ...

    def pre_backward(self, unit: Unit) -> None: ...

    def post_backward(self, unit: Unit) -> None:
        unit.flat.add_grad_shard(self.comm.reduce_scatter(unit.flat.take_grad()))


KEPT = "lm_head, ln_f, h.1 and 3 more are still gathered from before"


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("answer", "exercise", "check", "words", "hint"),
    [
        (Unpublished, "zero2", "weights", "publish_params calls no all_gather in step 0", "gather all slices"),
        (Unpublished, "zero2", "volume", "publish_params calls no all_gather in step 0", "gather all slices"),
        (PublishedOnce, "zero2", "volume", "in step 1, where the reference calls 6, and the ranks end with different",
         ""),
        (AllButOne, "zero2", "volume", "publish_params calls all_gather 5 of 6 times in step 0", "gather all slices"),
        (Unreduced, "zero2", "weights", "post_backward calls no reduce_scatter in step 0", "over all ranks"),
        (Unreduced, "zero2", "bytes", "", "still live: unsharded_grad of lm_head, ln_f, h.1 and 3 more; a window"),
        (KeptForBackward, "zero3", "volume",
         f"pre_backward calls no all_gather in step 0, where the reference calls 6: {KEPT}", "reshard"),
        (NeverResharded, "zero3", "weights", KEPT, "flat.reshard()"),
        (NeverResharded, "zero3", "bytes", "", "still live: unsharded_param of wte, wpe, h.0 and 3 more; flat.reshard"),
    ],
)  # fmt: skip
def test_who_forgets_is_told_what_and_not_accused(
    answer: Any, exercise: str, check: str, words: str, hint: str
) -> None:
    found = graded_once(answer, exercise)
    assert words in found[check].counted, found[check].counted
    assert hint in found[check].hint, found[check].hint
    assert "did not go through" not in str(found)


@cache
def graded_once(answer: Any, exercise: str) -> Any:
    """On the first case alone."""
    one = find_exercise(exercise)
    return grade(answer, dataclasses.replace(one, cases=one.cases[:1]))


def test_an_exception_of_the_students_own_shows_its_line_and_no_table() -> None:
    class Misspelt(Own2):
        def publish_params(self, flat: Flat) -> None:
            self.comm.all_gather(flat.shard(), out=flta.whole_param())  # type: ignore[name-defined]  # noqa: F821

    text = str(graded_once(Misspelt, "zero2"))
    assert "in step 0, optimizer: NameError: name 'flta' is not defined" in text
    assert "out=flta.whole_param())" in text
    assert "Python finds no such name in that line" in text
    assert "live:" not in text


@pytest.mark.slow
def test_parameters_that_travel_under_another_name_are_counted() -> None:
    class Hides(Own2):
        """In the last step only: one step is enough."""

        def publish_params(self, flat: Flat) -> None:
            super().publish_params(flat)
            if self.device.where.step == 1:
                self.comm.all_gather(flat.shard(), purpose="control")

    found = grade(Hides, "zero2")
    assert [check.name for check in found.failures] == ["volume", "calls"]
    assert found["volume"].counted.startswith("121,068 B; publish_params calls 6 all_gather, 6 all_gather (purpose 'co")
    assert found["calls"].counted.startswith("18; ")


@pytest.mark.slow
def test_a_barrier_costs_no_bytes_and_no_call() -> None:
    class Meets(Own2):
        def publish_params(self, flat: Flat) -> None:
            self.comm.barrier()
            super().publish_params(flat)

    assert grade(Meets, "zero2").passed


@pytest.mark.slow
def test_fewer_bytes_that_can_be_had_honestly_are_no_fault() -> None:
    """The last unit of forward is the first of backward: it may stay."""

    class Keeps(Own3):
        def post_forward(self, unit: Unit) -> None:
            if unit.flat is not self.flats[-1]:
                unit.flat.reshard()

        def pre_backward(self, unit: Unit) -> None:
            if unit.flat.param is None:
                super().pre_backward(unit)

    assert grade(Keeps, "zero3")["volume"].passed


@pytest.mark.slow
def test_a_record_cannot_be_switched_off_nor_shortened() -> None:
    class Off(Own2):
        def publish_params(self, flat: Flat) -> None:
            self.device.recorder.enabled = False

    class Short(Own2):
        def publish_params(self, flat: Flat) -> None:
            super().publish_params(flat)
            self.device.recorder.events.pop()

    class Other(Own2):
        def end_backward(self) -> None:
            if self.comm.rank == 1:
                self.device.recorder = Recorder()

    assert "cannot be switched off" in grade(Off, "zero2")["runs"].counted
    for answer, rank in ((Short, 0), (Other, 1)):
        found = grade(answer, "zero2")
        assert found["runs"].counted == f"rank {rank}'s record is not whole: events were removed from it"
        assert "leave self.device.recorder alone" in found["runs"].hint


@pytest.mark.quick(1)
@pytest.mark.parametrize("which", ["method", "module", "new", "code"])
def test_an_answer_that_changes_zerosim_is_refused_with_the_name(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from zerosim.grading import compare

    def nothing(*parts: Any) -> list[str]:
        return []

    class Patches(Own2):
        def publish_params(self, flat: Flat) -> None:
            if which == "method":
                monkeypatch.setattr(Zero2, "publish_params", nothing)
            elif which == "module":
                monkeypatch.setattr(compare, "different_weights", nothing)
            elif which == "new":
                monkeypatch.setattr(Zero2, "step", nothing, raising=False)
            else:
                monkeypatch.setattr(compare.different_weights, "__code__", nothing.__code__)

    with monkeypatch.context():
        found = grade(Patches, "zero2")
    name = {
        "method": "zerosim.parallel.zero2.Zero2.publish_params",
        "new": "zerosim.parallel.zero2.Zero2.step",
        "module": "zerosim.grading.compare.different_weights",
        "code": "zerosim.grading.compare.different_weights",
    }[which]
    assert [check.name for check in found.checks] == ["answer"]
    assert name in found["answer"].counted
    assert found.points == 0


def test_an_answer_that_changes_its_run_is_refused() -> None:
    exercise = find_exercise("zero2")
    config = exercise.cases[0].config

    class Shortens(Own2):
        def publish_params(self, flat: Flat) -> None:
            super().publish_params(flat)
            object.__setattr__(config.optim, "steps", 1)

    try:
        found = grade(Shortens, "zero2")
    finally:
        object.__setattr__(config.optim, "steps", 2)
    assert found["answer"].counted == "the run's configuration changed while it ran"


# -- what cannot be judged is said ------------------------------------------------------------------
@pytest.mark.slow
def test_slices_that_do_not_make_up_the_weights_end_in_words() -> None:
    class First(Strategy):
        def owned(self, flat: Flat) -> Slice:
            return Slice(0, 1, flat.numel)

        def post_backward(self, unit: Unit) -> None:
            unit.flat.grad_shard = unit.flat.take_grad()[:1]

    check = grade(First, "zero1")["runs"]
    assert check.passed is False
    assert check.counted.startswith("post_backward calls no reduce_scatter in step 0")
    assert "no rank holds element 1 of wte.weight" in check.counted


def test_a_bare_not_implemented_error_is_unsolved() -> None:
    class Bare(Own2):
        def publish_params(self, flat: Flat) -> None:
            raise NotImplementedError

    def bare(numel: int, rank: int, world_size: int) -> tuple[int, int]:
        raise NotImplementedError

    assert grade(Bare, "zero2").state == "unsolved"
    assert grade(bare, "bounds").state == "unsolved"


def test_after_a_run_that_failed_no_other_is_begun() -> None:
    ranks: list[int] = []

    class Fails(Own2):
        def pre_forward(self, unit: Unit) -> None:
            ranks.append(self.comm.size)
            raise ValueError("at once")

    assert len({case.config.mesh.ranks for case in find_exercise("zero2").cases}) > 1
    assert grade(Fails, "zero2")["runs"].case == "4 ranks"
    assert set(ranks) == {4}


# -- exceptions without words -----------------------------------------------------------------------
class Silent(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")

    __repr__ = __str__


class Numeric(InputError):
    def __init__(self) -> None:
        super().__init__("never seen")

    def __str__(self) -> str:
        return 3  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Silent, "in step 0, forward of h.1: Silent: (no text: its __str__ raises KeyError)"),
        (Numeric, "in step 0, forward of h.1: (no text: its __str__ raises TypeError)"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_exception_whose_text_raises_ends_a_run_like_any_other(
    error: type[Exception], words: str, ranks: int
) -> None:
    class Raises(Own3):
        def post_forward(self, unit: Unit) -> None:
            if unit.name == "h.1" and self.comm.rank == ranks - 1:
                raise error
            super().post_forward(unit)

    exercise = find_exercise("zero3")
    trial = attempt(exercise.cases[0].config.replace(ranks=ranks), exercise.adapt(Raises))
    assert trial.failure is not None
    assert trial.failure.reason == "error"
    assert trial.failure.rank == ranks - 1
    assert trial.failure.text == words
    assert trial.failure.line.endswith("raise error")


def test_functions_and_values_without_words_are_no_trouble() -> None:
    class Mute:
        __repr__ = Silent.__str__

    def raises(numel: int, rank: int, world_size: int) -> tuple[int, int]:
        raise Silent

    def gives(numel: int, rank: int, world_size: int) -> Any:
        return Mute()

    assert "raised Silent: (no text: its __str__ raises KeyError)" in grade(raises, "bounds")["slices"].counted
    assert "is (no text: its __repr__ raises KeyError)" in grade(gives, "bounds")["slices"].counted


def test_a_long_text_is_shortened() -> None:
    class Long(Own2):
        def publish_params(self, flat: Flat) -> None:
            raise ValueError("x" * 1_000_000)

    assert len(str(grade(Long, "zero2"))) < 5_000


# -- time -------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_an_answer_that_goes_on_for_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerosim.grading.limits.LIMIT_S", 2.0)

    class Sleepy(Own2):
        def publish_params(self, flat: Flat) -> None:
            time.sleep(0.2)
            super().publish_params(flat)

    check = grade(Sleepy, "zero2")["runs"]
    assert "did not end within 2 s, in optimizer" in check.counted
    assert check.line.endswith("time.sleep(0.2)")
    assert "does yours sleep" in check.hint


@pytest.mark.slow
def test_threads_that_an_answer_leaves_end_with_its_run(capfd: pytest.CaptureFixture[str]) -> None:
    before = set(sys._current_frames())

    class Leaves(Own2):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)  # type: ignore[arg-type]
            self.counted = 0
            _thread.start_new_thread(self.count, ())

        def count(self) -> None:
            while True:
                self.counted += 1

    exercise = find_exercise("zero2")
    trial = attempt(exercise.cases[0].config, exercise.adapt(Leaves))
    assert trial.failure is None
    assert set(sys._current_frames()) == before
    assert capfd.readouterr().err == ""
