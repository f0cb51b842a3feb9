"""A lesson's table: which columns stand right, how cells are written."""

from __future__ import annotations

import io

from rich.console import Console

from zerosim.lessons.tables import table


def lines(shown: object) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    console.print(shown)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_numbers_stand_right_with_thousands_apart() -> None:
    header, _, *rows = lines(table(("bytes", "what"), [(1234567, "a"), (8, "b")]))
    assert header.split() == ["bytes", "what"]
    assert rows == ["1,234,567  a", "        8  b"]


def test_numbers_with_units_are_numbers_and_words_are_not() -> None:
    assert lines(table(("x",), [("16.6 GB",), ("2Ψ",), ("-",)]))[-1] == "      -"
    assert lines(table(("x",), [("16.6 GB of it",), ("2Ψ",)]))[-1] == "2Ψ"


def test_truth_is_a_mark_and_title_and_note_surround_the_table() -> None:
    shown = lines(table(("x",), [(True,), (False,)], title="Above", note="Below."))
    assert shown[0] == "Above"
    assert shown[-1] == "Below."
    assert "✓" in "".join(shown)
    assert "≠" in "".join(shown)
