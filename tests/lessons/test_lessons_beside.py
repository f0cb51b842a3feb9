"""What a lesson opens to those who solved an exercise: zerosim's own lines, and events that really happen."""

from __future__ import annotations

import importlib
import inspect
import json

import pytest

from zerosim.errors import InputError
from zerosim.grading import Exercise, Grade, find_exercise
from zerosim.grading.verdict import Check, Verdict
from zerosim.lessons.beside import _rows, beside, once_solved, opened
from zerosim.lessons.claims import claim


def grade_of(name: str, passed: bool) -> Grade:
    one: Exercise = find_exercise(name)
    return Grade(one, Verdict((Check("weights", passed, "", ""),), None))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", sorted(_rows()))
def test_every_event_is_counted_and_the_lines_are_zerosims_own(name: str) -> None:
    shown, row = opened(name), _rows()[name]
    for call in shown.calls:
        assert bool(call.event) == (call.calls > 0) == (call.sent_bytes > 0), call
    source = inspect.getsource(importlib.import_module(row["module"]))
    (lines,) = [code for title, code in shown.panes.items() if title.startswith("zerosim")]
    assert all(line in source for line in lines.splitlines())
    assert "\n\n\n" not in lines
    if row["deepspeed"]:
        assert json.loads(row["deepspeed"])["zero_optimization"]["stage"] == row["stage"]
    assert "<pre" in shown._repr_html_()
    assert row["note"] in str(shown)


def test_it_opens_after_a_full_grade_alone() -> None:
    for outputs in ({}, {1: "text"}, {1: grade_of("zero2", False)}, {1: grade_of("zero1", True)}):
        closed = beside(outputs, "zero2")
        assert not closed.panes
        assert "Solve exercise 5 first" in str(closed)
    assert beside({1: grade_of("zero2", False), 2: grade_of("zero2", True)}, "zero2").panes


def test_lines_that_give_an_exercise_away_are_locked_until_it_is_solved() -> None:
    closed = once_solved({1: grade_of("zero3", False), 2: grade_of("zero2", True)}, "zero3", "for unit in model.units:")
    assert closed == "Solve exercise 6 first. Then run this cell again: it shows zerosim's own lines."
    assert once_solved({1: grade_of("zero3", True)}, "zero3", "for unit in model.units:") == "for unit in model.units:"


def test_other_exercises_have_nothing_beside_them() -> None:
    with pytest.raises(InputError, match="expected one of"):
        beside({}, "bounds")


def test_a_claim_is_printed_or_stops(capsys: pytest.CaptureFixture[str]) -> None:
    claim("two and two are four", 2 + 2 == 4)
    assert capsys.readouterr().out == "✓ two and two are four\n"
    with pytest.raises(AssertionError, match="claim does not hold: two and two are five"):
        claim("two and two are five", 2 + 2 == 5)
