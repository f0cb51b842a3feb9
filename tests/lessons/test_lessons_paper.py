"""Scenarios by name, judged for a notebook's cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerosim.errors import InputError
from zerosim.lessons.paper import check


def test_a_scenario_is_found_and_judged_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = check("figure1")
    assert report.passed
    assert [cell.printed.digits for cell in report.files[0].tables[0].cells] == ["120", "31.4", "16.6", "1.9"]
    assert report.files[0].path == "scenarios/figure1.toml"  # not where it was found


def test_a_wrong_figure_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Path(__file__).parents[2] / "scenarios" / "figure1.toml"
    (tmp_path / "scenarios").mkdir()
    (tmp_path / "scenarios" / "figure1.toml").write_text(
        original.read_text("utf-8").replace('"31.4"', '"31.5"'), "utf-8"
    )
    monkeypatch.chdir(tmp_path)
    report = check("figure1")
    assert not report.passed
    assert report.files[0].num_failed == 1


def test_one_table_of_a_file_can_be_asked_for() -> None:
    report = check("volumes", title="With gradient accumulation")
    assert [table.expectation.title for table in report.files[0].tables] == ["With gradient accumulation"]
    with pytest.raises(InputError, match="With gradient accumulation"):
        check("volumes", title="no such title")
    with pytest.raises(InputError, match="table1"):
        check("no_such_scenario")
