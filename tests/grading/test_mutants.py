"""A published solution with one change is no solution, unless it computes the same."""

from __future__ import annotations

import ast
from collections import Counter

import pytest
from forty import SOLUTIONS, solution
from grading_here import grade_source
from mutants import equivalent, graded, key, mutants, sample

from zerosim.grading import EXERCISES, find_exercise
from zerosim.grading.variants import variant

FEW = 3
"""Mutants of each solution, of hundreds in all: about 40 seconds of processor time."""


def test_a_change_is_one_constant_operator_or_call() -> None:
    every = mutants("bounds")
    ways = {one.now for one in every if one.was == "size = -(-numel // world_size)"}
    assert {"size = -(numel // world_size)", "size = -(-numel * world_size)", "size = -numel // world_size"} <= ways
    assert "return (rank * size, (rank + 2) * size)" in {one.now for one in every}
    texts = [ast.unparse(ast.parse((SOLUTIONS / "bounds.py").read_text("utf-8"))), *(one.source for one in every)]
    assert max(Counter(texts).values()) == 1
    assert sample("bounds", 5) == sample("bounds", 5)


@pytest.mark.slow
def test_mutants_that_compute_the_same_are_mutants_and_have_a_reason() -> None:
    listed = equivalent()
    there = Counter(key(one) for name in {row[0] for row in listed} for one in mutants(name))
    assert all(there[row] == 1 for row in listed)
    assert all(len(why) > 20 and why.endswith(".") for why in listed.values())


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 7, 11])
def test_a_term_of_what_to_offload_is_needed_at_every_seed(seed: int) -> None:
    one = variant(find_exercise("offload"), seed)
    for now in ("2 * far", "4 * far * links['nvme'] /"):
        old = "4 * far" if now == "2 * far" else "4 * far /"
        assert not grade_source(solution("offload", (old, now)), one).passed


@pytest.mark.slow
@pytest.mark.parametrize("name", [one.name for one in EXERCISES])
def test_a_mutant_is_no_solution(name: str) -> None:
    """A few, at one seed after the other. `mutants.py` grades all of them."""
    listed = equivalent()
    for seed, mutant in enumerate(sample(name, FEW)):
        found = graded(mutant, seed)
        assert found.passed == (key(mutant) in listed), f"{mutant}\n{found}"
