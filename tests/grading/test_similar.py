"""Likeness sees through names, types and constants, and leaves what is short or given alone."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from zerosim.cli.main import main
from zerosim.grading import EXERCISES, find_exercise
from zerosim.grading.similar import hand_in_parts, likenesses, own_parts, published_parts
from zerosim.optim.radam import RAdam

SOLUTIONS = Path(__file__).parents[2] / "notebooks" / "solutions"


def source(name: str) -> str:
    return (SOLUTIONS / f"{name}.py").read_text("utf-8")


def found(text: str, exercise: str) -> list[str]:
    parts = hand_in_parts(text, [find_exercise(exercise)], "hw.py")
    return likenesses(parts, (own_parts(), published_parts(None)))


WHILE = """def my_1f1b(num_stages, stage, micro_batches, chunks=1):
    out, ahead, back = [], 0, 0
    while back < micro_batches:
        if ahead < min(micro_batches, back + num_stages - stage):
            out.append(Forward(ahead))
            ahead += 1
        else:
            out.append(Backward(back))
            back += 1
    return out
"""
COPIES = {
    "bob.py": WHILE.replace("ahead", "front"),
    "cy.py": WHILE.replace(
        "        if ahead < min(micro_batches, back + num_stages - stage):",
        "        room = back + num_stages - stage\n        if ahead < min(micro_batches, room):",
    ),
}


def test_the_form_of_a_published_solution_is_nobodys() -> None:
    """Honest answers have it, with other names or a temporary, too."""
    published = published_parts(None)
    for one in EXERCISES:
        text = re.sub(r"\b(unit|flat|slot|hole)\b", r"\1_x", source(one.name))
        assert likenesses(hand_in_parts(text, [one], "hw.py", published), (published,)) == [], one.name


def test_a_renamed_variable_or_a_temporary_does_not_escape_and_forms_are_counted() -> None:
    one = [find_exercise("one_f_one_b")]
    hand_ins = {name: hand_in_parts(text, one, name) for name, text in {"ann.py": WHILE, **COPIES}.items()}
    other = hand_in_parts(source("one_f_one_b"), one, "eve.py")
    for name, mine in hand_ins.items():
        rest = [part for place, parts in hand_ins.items() if place != name for part in parts]
        (said,) = likenesses(mine, [[*rest, *other]])
        assert "my_1f1b is 100% like" in said
        assert "(2 of 2 files have this form)" in said


@pytest.mark.slow
def test_a_renamed_copy_of_zerosims_own_is_seen() -> None:
    copy = inspect.getsource(RAdam).replace("class RAdam", "class MyRAdam").replace("rho", "worth")
    assert "MyRAdam is 100% like zerosim/optim/radam.py, RAdam" in found(copy, "radam")


@pytest.mark.parametrize("name", ["bounds", "tied", "bug_thrifty", "bug_shared", "bug_sparing"])
def test_what_is_short_or_given_is_not_compared(name: str) -> None:
    assert hand_in_parts(source(name), [find_exercise(name)], "hw.py") == []


@pytest.mark.slow
def test_another_way_to_the_same_is_not_like_it() -> None:
    assert hand_in_parts(WHILE, [find_exercise("one_f_one_b")], "hw.py")
    assert found(WHILE, "one_f_one_b") == []


@pytest.mark.slow
def test_it_is_reported_and_costs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ann.py", "bob.py"):
        (tmp_path / name).write_text("from zerosim.grading import Backward, Forward\n\n\n" + WHILE, "utf-8")
    assert main(["grade", str(tmp_path / "ann.py")]) == 0
    assert "similar" not in capsys.readouterr().out
    assert main(["grade", "--similar", str(tmp_path / "ann.py")]) == 0
    assert "similar, for instructors: nothing" in capsys.readouterr().out
    assert main(["grade", "--class", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "ann.py,4/4,,my_1f1b is 100% like bob.py, my_1f1b" in out.replace('"', "")
