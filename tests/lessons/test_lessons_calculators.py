"""Calculators term by term: the terms are the rule, and every difference from the count has a reason."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from zerosim.analysis.formulas import calculators
from zerosim.lessons.calculators import (
    NEAREST,
    WHY,
    Compared,
    answers,
    calculators_figure,
    compare,
    count,
    differences_table,
    terms,
    why,
)

PSI, RANKS = 7_500_000_000, 64
NAMES = [calculator.name for calculator in calculators()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("psi", "ranks"), [(PSI, RANKS), (1_000_000, 7), (175_000_000_000, 1024)])
def test_terms_add_up_to_the_published_rule(name: str, psi: int, ranks: int) -> None:
    rule = {calculator.name: calculator for calculator in calculators()}[name]
    for stage in range(4):
        found, total = terms(name, stage, psi, ranks), rule.model_states(stage, psi, ranks)
        assert (found is None) == (total is None)
        if found is not None and total is not None:
            assert 0 <= sum(found.values()) - total < 1  # one of them cuts to a whole byte


def every() -> list[Compared]:
    return [one for name in NAMES for stage in range(4) if (one := compare(name, stage)) is not None]


def test_every_difference_is_named_and_no_reason_is_unused() -> None:
    used = set()
    for one in every():
        assert one.total == one.counted_total + sum(one.differences.values())
        for term in one.differences:
            assert why(one, term)
            used.add((one.name, term))
    assert used == set(WHY)
    assert set(NEAREST) == set(NAMES)


def test_known_answers() -> None:
    by = {(one.name, one.stage): one for one in every()}
    assert all(not by["ZeRO paper", stage].differences for stage in range(4))
    assert all(not by["llm-analysis", stage].differences for stage in range(4))
    assert by["DeepSpeed estimator, code", 2].counted_total == 2 * PSI + 18 * PSI // RANKS
    assert by["DeepSpeed estimator, code", 3].differences == {"grad": -2 * PSI / RANKS}
    assert by["EleutherAI cookbook", 3].differences == {"comm": 10**9, "unsharded_param": 2 * 10**9}
    assert by["mlsysim 0.3.0", 0].differences == {"comm": 2 * PSI // 20}
    assert compare("Megatron-LM theoretical", 2) is None


def test_counts_follow_the_recipe_and_the_moment() -> None:
    assert count("paper", 2, 6400, 64, "end_of_backward") == {"param": 12800, "grad": 200, "optim": 1200}
    assert count("fp32 gradients", 2, 6400, 64, "end_of_backward")["grad"] == 400
    assert count("deepspeed", 2, 6400, 64, "gradients_upcast")["grad"] == 600
    assert count("deepspeed", 2, 6400, 64, "after_step")["grad"] == 0


def test_picture_and_tables_can_be_drawn() -> None:
    figure = calculators_figure(2)
    labels = [text.get_text() for axes in figure.axes for text in axes.get_yticklabels()]
    assert labels[0].startswith("counted: paper")
    assert len(labels) == 10


def test_tables_say_what_was_found() -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(answers(), differences_table(every()))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "31.88" in shown
    assert "as in the code" in shown
    assert "live parameters" in shown
