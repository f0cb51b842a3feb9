"""Exercise 46: typical mistakes with the scales of a matrix in e4m3, and what is said of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from forty import solution as text_of_solution
from grading_here import assert_told, grade

from zerosim.grading.scaling import matrices, wrong_scales
from zerosim.tensor.float8 import E4M3, Casting, amax_of, scales_from

Rule = Callable[[Any], Any]


def by_block(rule: Rule, zeros: float = 1.0) -> Any:
    """Return an answer that applies a rule to the numbers of each block, and gives zeros another scale."""

    def answer(values: Any, block: tuple[int, int]) -> Any:
        (rows, columns), (high, wide) = values.shape, block
        found = np.empty((rows // high, columns // wide), np.float32)
        for i, j in np.ndindex(found.shape):
            numbers = values[i * high : (i + 1) * high, j * wide : (j + 1) * wide].astype(np.float64)
            found[i, j] = rule(numbers) if numbers.any() else zeros
        return found

    return answer


def amax(numbers: Any) -> float:
    return float(np.abs(numbers).max())


def ceiling(numbers: Any) -> float:
    """The next power of two above amax / 448."""
    return float(2.0 ** np.ceil(np.log2(amax(numbers) / 448)))


def changed(change: Rule) -> Any:
    right = by_block(lambda numbers: amax(numbers) / 448)
    return lambda values, block: change(right(values, block))


RIGHT = {
    "amax / 448": by_block(lambda numbers: amax(numbers) / 448),
    "rounded up to a power of two": by_block(ceiling),
    "any scale for zeros": by_block(lambda numbers: amax(numbers) / 448, zeros=1e-12 / 448),
    "in float64": changed(lambda scales: scales.astype(np.float64)),
}


def whole(values: Any, block: tuple[int, int]) -> Any:
    """One scale for all blocks."""
    (rows, columns), (high, wide) = values.shape, block
    return np.full((rows // high, columns // wide), amax(values) / 448, np.float32)


WRONG = [
    (by_block(lambda numbers: np.abs(numbers).mean() / 448), "numbers saturate", "a mean or a deviation"),
    (by_block(lambda numbers: numbers.std() / 448), "numbers saturate", "a mean or a deviation"),
    (by_block(lambda numbers: np.abs(numbers).mean()), "comes back", "a mean or a deviation"),
    (by_block(lambda numbers: 2 * ceiling(numbers)), "comes back as 0", "a power of two too high"),
    (by_block(lambda numbers: 2 * amax(numbers) / 448), "comes back as 0", "a power of two too high"),
    (by_block(lambda numbers: 4 * ceiling(numbers)), "comes back as 0", "a power of two too high"),
    (by_block(lambda numbers: ceiling(numbers) / 2), "saturate", "has to be rounded up"),
    (by_block(lambda numbers: 448 / amax(numbers)), "with a scale of", "one over the scale"),
    (by_block(lambda numbers: amax(numbers) / 448, zeros=0.0), "zeros are nan", "0 / 0 is nan"),
    (by_block(lambda numbers: amax(numbers) / 448, zeros=np.nan), "zeros are nan", "0 / 0 is nan"),
    (by_block(lambda numbers: numbers.max() / 448), "saturate", "absolute values first"),
    (by_block(amax), "comes back as 0", "not to 1"),
    (by_block(lambda numbers: amax(numbers) / 57344), "saturate", "must become 448"),
    (by_block(lambda numbers: 100 * amax(numbers) / 448), "comes back as 0", "which number must become 448"),
    (by_block(lambda numbers: -amax(numbers) / 448), "no codes", "positive, finite"),
    (whole, "comes back as 0", "another block"),
    (changed(lambda scales: scales[::-1]), "with a scale of", "another block"),
    (changed(np.ravel), "expected floats", "not a flat list"),
    (changed(lambda scales: scales.max()), "expected floats", "a scale for each block"),
    (changed(lambda scales: [*scales.tolist(), [1.0]]), "expected floats", "a scale for each block"),
    (changed(lambda scales: None), "expected floats", "a scale for each block"),
]


@pytest.mark.parametrize("answer", RIGHT)
def test_other_right_answers_are_right(answer: str) -> None:
    assert grade(RIGHT[answer], "scale").state == "solved"


@pytest.mark.quick(8)
@pytest.mark.parametrize(("answer", "words", "hint"), WRONG)
def test_a_mistake_with_scales_is_told_what_it_is(answer: Any, words: str, hint: str) -> None:
    assert_told(grade(answer, "scale"), words, hint)


@pytest.mark.parametrize("seed", range(20))
def test_every_seed_tells_a_factor_of_two(seed: int) -> None:
    for asked, values, block in matrices(seed):
        for name, answer in RIGHT.items():
            assert wrong_scales(asked, values, block, answer(values, block)) is None, name
        high = by_block(lambda numbers: 2 * amax(numbers) / 448)
        assert wrong_scales(asked, values, block, high(values, block)) is not None


def test_the_scales_of_the_solution_are_torchaos() -> None:
    names: dict[str, Any] = {}
    exec(text_of_solution("scale"), names)
    values = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    casting = Casting(E4M3, (2, 16), rule="deepseek")
    theirs = np.empty((4, 4), np.float32)
    scales_from(np, casting, amax_of(np, casting, values), theirs)
    assert np.array_equal(names["my_scale"](values, (2, 16)), theirs)
