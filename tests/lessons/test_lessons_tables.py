"""A lesson's table: which columns stand right, how cells are written."""

from __future__ import annotations

import io

from rich.console import Console

from zerosim.lessons.tables import table


def lines(shown: object, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
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


def test_a_wide_table_is_folded_and_loses_nothing() -> None:
    """Below 100 columns its last ones stand below, beside the first words; words are wrapped and numbers are whole."""
    header = ("recompute", "attention core", *(f"bytes of {n}" for n in "abcdef"), "why so")
    rows = [
        ("none", "eager", *(10**12 + n for n in range(6)), "a reason in several words"),
        ("full", "flash", *range(6), ""),
    ]
    wide, narrow = lines(table(header, rows), 200), lines(table(header, rows), 50)
    assert len(wide) == 4
    assert max(len(line) for line in narrow) <= 50
    for number in range(6):
        assert sum(f"{10**12 + number:,}" in line for line in narrow) == 1
    assert (
        sum(line.startswith("none       eager") for line in narrow) == sum("recompute" in line for line in narrow) > 2
    )
    assert {"a", "reason", "in", "several", "words"} <= set(" ".join(narrow).split())
    assert "…" not in "".join(narrow)
