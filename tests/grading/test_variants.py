"""Variants by seed: what differs, and that each is still the exercise it is a variant of."""

from __future__ import annotations

from types import ModuleType

import pytest
from grading_here import grade

from zerosim.errors import InputError
from zerosim.grading import EXERCISES, Exercise, find_exercise
from zerosim.grading.given import bugs, other_bugs
from zerosim.grading.variants import MOST, variant

BUGS = [one for one in EXERCISES if one.name.startswith("bug_")]
NAMES = dict(ids=lambda one: one.name)


@pytest.mark.slow
def test_seed_0_is_the_exercise_as_it_is_printed_and_a_seed_is_always_the_same() -> None:
    for one in EXERCISES:
        assert variant(one, 0) is one
        first, again = variant(one, 7), variant(one, 7)
        assert [(case.label, case.config) for case in first.cases] == [
            (case.label, case.config) for case in again.cases
        ]
        assert (first.given, first.hints) == (again.given, again.hints)
        for seed in range(20):
            labels = [case.label for case in variant(one, seed).cases]
            assert len(set(labels)) == len(labels)
    for seed in (-1, MOST + 1):
        with pytest.raises(InputError, match=f"--seed {seed}: expected 0 to"):
            variant(EXERCISES[0], seed)


def test_sizes_units_and_owners_are_drawn() -> None:
    cases = [case for seed in range(1, 30) for case in variant(find_exercise("zero2"), seed).cases]
    assert {case.config.model.family for case in cases} == {"gpt", "llama"}
    assert {case.config.model.layers for case in cases} == {2, 3}
    assert {case.config.mesh.ranks for case in cases} == {3, 4, 5, 6, 7}
    assert {case.config.model.seq for case in cases} == set(range(4, 9))
    assert len({case.label for case in cases}) > 40


def test_what_is_the_point_of_a_run_stays() -> None:
    for seed in range(1, 20):
        assert variant(find_exercise("bug_sparing"), seed).cases[1] == find_exercise("bug_sparing").cases[1]
        assert variant(find_exercise("borders"), seed).cases == find_exercise("borders").cases
        assert variant(find_exercise("bounds"), seed).cases[1].config.mesh.ranks == 7
        hasty = variant(find_exercise("bug_hasty"), seed)  # it names GPT's units
        assert {case.config.model.family for case in hasty.cases} == {"gpt"}
        stages = variant(find_exercise("one_f_one_b"), seed)
        assert [case.config.mesh.pp for case in stages.cases] == [4, 4]
        assert stages.cases[1].config.data.accumulate == 2  # fewer than stages
        ragged = variant(find_exercise("bug_rounds"), seed).cases[1].config
        assert ragged.data.accumulate % ragged.mesh.pp == 1  # a last round that is shorter


@pytest.mark.quick(1)
@pytest.mark.parametrize("one", BUGS, **NAMES)
def test_either_bug_is_drawn_and_stands_under_one_name(one: Exercise) -> None:
    drawn = {variant(one, seed).given for seed in range(1, 20)}
    name = one.given.__name__
    assert drawn == {getattr(bugs, name), getattr(other_bugs, name)}
    texts = {variant(one, seed).skeleton for seed in range(1, 20)}
    assert len(texts) == 2
    assert all(f" {name}(" in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("given", [bugs, other_bugs], ids=["bugs", "other_bugs"])
@pytest.mark.parametrize("one", BUGS, **NAMES)
def test_either_bug_fails_in_a_variant_and_earns_nothing(one: Exercise, given: ModuleType) -> None:
    bug = getattr(given, one.given.__name__)
    set_ = next(drawn for drawn in (variant(one, seed) for seed in range(1, 20)) if drawn.given is bug)
    found = grade(set_.given, set_)
    assert (found.state, found.points) == ("failed", 0), str(found)


def test_questions_are_other_ones() -> None:
    for one in EXERCISES:
        if one.examine is not None and one.name not in ("adagrad", "radam"):
            questions = [variant(one, seed).examine.questions(seed) for seed in (0, 1, 2)]  # type: ignore[union-attr]
            assert len({repr(some) for some in questions}) == 3, one.name
