"""Exercises 36 to 38: typical mistakes, and what is said of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from grading_here import assert_told, grade


def merged(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    lse = np.logaddexp(lse_a, lse_b)
    a, b = np.exp(lse_a - lse)[:, None], np.exp(lse_b - lse)[:, None]
    return a * out_a + b * out_b, lse


def weighted(weight: Any, *, first: int = 1, lse: Any = None) -> Any:
    """Out by these weights of (lse_a, lse_b), and another lse."""

    def answer(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
        with np.errstate(all="ignore"):
            a, b = (weight(one)[:, None] for one in (lse_a, lse_b)[::first])
            out = (a * out_a + b * out_b) / (a + b)
            return out, (lse or np.logaddexp)(lse_a, lse_b)

    return answer


def naive(*of: Any) -> tuple[Any, Any]:
    with np.errstate(all="ignore"):
        return weighted(np.exp, lse=lambda a, b: np.log(np.exp(a) + np.exp(b)))(*of)


def by_maximum(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Right but for rows that read no key of b, whose 0 weights are multiplied by -inf."""
    with np.errstate(all="ignore"):
        out, lse = merged(out_a, lse_a, out_b, lse_b)
        return out, lse + 0 * lse_b


def exchanged(parts: Any, back: bool, *, cut: Any = None, strided: bool = False, last_first: bool = False) -> Any:
    axis, ranks = (int(not back) if cut is None else cut), len(parts)
    whole = np.concatenate(parts[:: -1 if last_first else 1], axis=1 - axis)
    if strided:
        return [np.take(whole, range(rank, whole.shape[axis], ranks), axis=axis) for rank in range(ranks)]
    return np.split(whole, ranks, axis=axis)


def reshaped(parts: Any, back: bool) -> Any:
    return [part.reshape(right.shape) for part, right in zip(parts, exchanged(parts, back), strict=True)]


MISTAKES = [
    ("merge", lambda a, x, b, y: ((a + b) / 2, np.logaddexp(x, y)), "usual scores", "do not count alike"),
    ("merge", lambda a, x, b, y: (a + b, np.logaddexp(x, y)), "out[", "add up to 1"),
    ("merge", weighted(np.exp, first=-1), "out[", "have changed places"),
    ("merge", weighted(lambda lse: lse), "out[", "not of lse"),
    ("merge", lambda a, x, b, y: (3 * merged(a, x, b, y)[0], x), "all of out is 3 times", "its share of the sum"),
    ("merge", naive, "large scores: 6 queries, 4 columns: out[0, 0] is nan", "is inf or 0"),
    ("merge", by_maximum, "do not read: 7 queries, 2 columns: lse[0] is nan", "exp(-inf) is 0"),
    ("merge", lambda *of: (merged(*of)[0], of[1] + of[3]), "lse[", "not their logarithms"),
    ("merge", lambda *of: (merged(*of)[0], np.maximum(of[1], of[3])), "lse[", "leaves the smaller block out"),
    ("merge", lambda *of: (merged(*of)[0], np.exp(merged(*of)[1])), "lse[", "not the sum"),
    ("merge", lambda *of: merged(*of)[0], "expected out, lse", "one row per query"),
    ("balance", lambda c: [[2 * r, 2 * r + 1] for r in range(c)], "computes 2 blocks of scores, rank 1 6", "early or"),
    ("balance", lambda c: [[r, r + c] for r in range(c)], "0 computes 3 blocks of scores, rank 1 5", "later early"),
    ("balance", lambda c: [[r, 2 * c - r] for r in range(c)], "there is no piece 4", "0 to 3"),
    ("balance", lambda c: [[r, c - 1 - r] for r in range(c)], "piece 0 is on 2 ranks", "each piece once"),
    ("balance", lambda c: [[0], *([r, r + c] for r in range(1, c))], "piece 2 is on no rank", "each piece once"),
    ("balance", lambda c: [[0], range(1, 2 * c)], "rank 1 has range(1, 4)", "whole numbers"),
    ("balance", lambda c: [[0], list(range(1, 2 * c))], "rank 0 has 1 piece", "as many tokens"),
    ("ulysses", lambda parts, back: parts, "rank 0 has (4, 4, 3), expected (8, 2, 3)", "nothing was exchanged"),
    ("ulysses", lambda parts, back: [np.concatenate(parts, axis=int(back))] * len(parts), "has (", "all-gather"),
    ("ulysses", lambda parts, back: exchanged(parts, back, cut=1), ", back: rank 0 has (", "back, tokens are cut"),
    ("ulysses", lambda parts, back: exchanged(parts, back, strided=True), "head", "are neighbours"),
    ("ulysses", lambda parts, back: exchanged(parts, back, last_first=True), "of token", "rank 0 stands first"),
    ("ulysses", reshaped, "of token 0, head", "a reshape moves no element"),
    ("ulysses", lambda parts, back: [part[:1] for part in parts], "expected (", "heads are cut and tokens joined"),
    ("ulysses", lambda parts, back: parts[0], "no list of 2 arrays", "for each rank"),
]  # fmt: skip


@pytest.mark.quick(3)
@pytest.mark.parametrize(("name", "answer", "words", "hint"), MISTAKES)
def test_a_typical_mistake_is_told_what_it_is(name: str, answer: Any, words: str, hint: str) -> None:
    assert_told(grade(answer, name), words, hint)


def test_every_order_of_the_ranks_is_as_good() -> None:
    assert grade(lambda c: [(2 * c - 1 - r, r) for r in reversed(range(c))], "balance").passed
