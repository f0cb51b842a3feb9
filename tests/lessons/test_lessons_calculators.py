"""Calculators term by term: the terms are the rule, and every difference from the count has a reason."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from zerosim.analysis.formulas import calculators
from zerosim.lessons.calculators import NEAREST, WHY, calculators_figure, differences_table

PSI, RANKS = 7_500_000_000, 64
NAMES = [calculator.name for calculator in calculators()]


@pytest.fixture(scope="module")
def cells(defined: Any) -> dict[str, Any]:
    """Notebook 09's `count`, and `found`: all answers beside their counts."""
    names: dict[str, Any] = defined("09", "01", "04a", "05", "06a")
    return names


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("psi", "ranks"), [(PSI, RANKS), (1_000_000, 7), (175_000_000_000, 1024)])
def test_terms_add_up_to_the_published_rule(name: str, psi: int, ranks: int, cells: dict[str, Any]) -> None:
    rule = {calculator.name: calculator for calculator in calculators()}[name]
    for stage in range(4):
        found, total = cells["terms"](name, stage, psi, ranks), rule.model_states(stage, psi, ranks)
        assert (found is None) == (total is None)
        if found is not None and total is not None:
            assert 0 <= sum(found.values()) - total < 1  # one of them cuts to a whole byte


def test_every_difference_is_named_and_no_reason_is_unused(cells: dict[str, Any]) -> None:
    used = set()
    for one in cells["found"]:
        assert one.total == one.counted_total + sum(one.differences.values())
        for term in one.differences:
            assert one.why(term)
            used.add((one.name, term))
    assert used == set(WHY)
    assert set(NEAREST) == set(NAMES)


def test_counts_follow_the_recipe_and_the_moment(cells: dict[str, Any]) -> None:
    count = cells["count"]
    assert count("paper", stage=2, params=6400) == {"param": 12800, "grad": 200, "optim": 1200}
    assert count("fp32 gradients", stage=2, params=6400)["grad"] == 400
    assert count("deepspeed", stage=2, params=6400)["grad"] == 600


def test_the_picture_has_a_bar_per_answer_and_recipe(cells: dict[str, Any]) -> None:
    figure = calculators_figure([one for one in cells["found"] if one.stage == 2], "title")
    labels = next(figure.panels).y.rows
    assert labels[0].startswith("counted: paper")
    assert len(labels) == 10


def test_tables_say_what_was_found(cells: dict[str, Any]) -> None:
    assert "31.88" in [cell for line in cells["lines"] for cell in line]
    console = Console(file=io.StringIO(), width=140)
    console.print(differences_table(cells["found"]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "as in the code" in shown
    assert "live parameters" in shown
