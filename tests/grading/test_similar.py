"""Likeness sees through names, types and constants, and leaves what is short or given alone."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from zerosim.cli.main import main
from zerosim.grading import find_exercise
from zerosim.grading.similar import hand_in_parts, likenesses, own_parts, published_parts
from zerosim.optim.radam import RAdam

SOLUTIONS = Path(__file__).parents[2] / "notebooks" / "solutions"


def source(name: str) -> str:
    return (SOLUTIONS / f"{name}.py").read_text("utf-8")


def found(text: str, exercise: str) -> list[str]:
    parts = hand_in_parts(text, [find_exercise(exercise)], "hw.py")
    return likenesses(parts, (own_parts(), published_parts(None)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["zero3", "prefetch", "best_fit", "zb_h1"])
def test_a_renamed_copy_of_a_solution_is_seen(name: str) -> None:
    given = find_exercise(name).given.__name__
    renamed = re.sub(r"\b(unit|self|flat|work|slot|hole)\b", r"\1_x", source(name)).replace('    "', "    'x' \"")
    assert f"{given} is 100% like solutions/{name}.py, {given}" in found(renamed, name)


@pytest.mark.slow
def test_a_renamed_copy_of_zerosims_own_is_seen() -> None:
    copy = inspect.getsource(RAdam).replace("class RAdam", "class MyRAdam").replace("rho", "worth")
    assert "MyRAdam is 100% like zerosim/optim/radam.py, RAdam" in found(copy, "radam")


@pytest.mark.parametrize("name", ["bounds", "tied", "bug_thrifty", "bug_shared", "bug_sparing"])
def test_what_is_short_or_given_is_not_compared(name: str) -> None:
    assert hand_in_parts(source(name), [find_exercise(name)], "hw.py") == []


@pytest.mark.slow
def test_another_way_to_the_same_is_not_like_it() -> None:
    mine = """def my_1f1b(num_stages, stage, micro_batches, chunks=1):
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
    assert hand_in_parts(mine, [find_exercise("one_f_one_b")], "hw.py")
    assert found(mine, "one_f_one_b") == []


@pytest.mark.slow
def test_it_is_reported_and_costs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ann.py", "bob.py"):
        (tmp_path / name).write_text(source("zero3"), "utf-8")
    assert main(["grade", str(tmp_path / "ann.py")]) == 0
    assert "similar" not in capsys.readouterr().out
    assert main(["grade", "--similar", str(tmp_path / "ann.py")]) == 0
    assert "MyZero3 is 100% like solutions/zero3.py, MyZero3" in capsys.readouterr().out
    assert main(["grade", "--class", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "ann.py,7/7,,MyZero3 is 100% like solutions/zero3.py, MyZero3; MyZero3 is 100% like bob.py" in out.replace(
        '"', ""
    )
