"""Exercises 29 to 32: typical mistakes, and what is said of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from grading_here import assert_told, grade


def adapter(x: Any, w: Any, a: Any, b: Any, s: float, dy: Any) -> dict[str, Any]:
    t, dt = x @ a.T, s * dy @ b
    return {"y": x @ w.T + s * t @ b.T, "dx": dy @ w + dt @ a, "da": dt.T @ x, "db": s * dy.T @ t}


def codes(values: Any, table: Any, *, above: bool = False, low_first: bool = False) -> tuple[Any, float]:
    absmax = float(np.abs(values).max())
    places = table if above else (table[:-1] + table[1:]) / 2
    each = np.searchsorted(places, values / (absmax or 1.0)).astype(np.uint8)
    each = np.append(each, np.zeros(len(each) % 2, np.uint8))
    return each[low_first::2] << 4 | each[1 - low_first :: 2], absmax


def products(m: Any, q: Any) -> tuple[Any, Any, Any]:
    p, _ = np.linalg.qr(np.mean([one @ q for one in m], axis=0))
    return p, np.mean([one.T @ p for one in m], axis=0), q


def sent(grad: Any, residual: Any, k: int, by: Any) -> tuple[Any, Any, Any]:
    total = grad + residual
    places = np.argsort(-by, kind="stable")[:k]
    left = total.copy()
    left[places] = 0
    return places, total[places], left


def bare(m: Any, q: Any) -> tuple[Any, Any]:
    p = np.mean([one @ q for one in m], axis=0)
    new = np.mean([one.T @ p for one in m], axis=0)
    return p @ new.T, new


def other(**parts: Any) -> Any:
    return lambda *args: tuple(parts[name](*args) if name in parts else value for name, value in adapter(*args).items())


MISTAKES = [
    ("adapter", other(dx=lambda x, w, a, b, s, dy: s * dy @ b @ a), "dx[", "A frozen W has no gradient"),
    ("adapter", other(db=lambda x, w, a, b, s, dy: dy.T @ x @ a.T), "all of db is 0.5 times the expected", "scale"),
    ("adapter", lambda *args: tuple(adapter(*args).values())[:3], "expected y, dx, da, db", "return y, dx"),
    ("adapter", lambda x, w, a, b: None, "positional arguments but 6", "keep the arguments"),
    ("nf4", lambda *args: codes(*args, low_first=True), "have changed places", "which value of a pair"),
    ("nf4", lambda *args: codes(*args, above=True), "nearest is", "the next one above"),
    ("nf4", lambda v, table: (codes(v, table)[0], float(v.max())), "absmax is", "most negative value"),
    ("top_k", lambda g, r, k: sent(g, r, k, np.abs(g)), "the largest are", "not sent before count too"),
    ("top_k", lambda g, r, k: sent(g, r, k, g + r), "the largest are", "largest magnitude"),
    ("top_k", lambda g, r, k: (*sent(g, r, k, np.abs(g + r))[:2], g + r), "residual[", "sent twice"),
    ("top_k", lambda g, r, k: (*sent(g, r, k, np.abs(g + r))[:2], 0 * g), "residual[", "nothing may be lost"),
    ("powersgd", bare, "approximation[", "columns must be orthonormal"),
    ("powersgd", lambda m, q: (lambda p, n, old: (p @ n.T, old))(*products(m, q)), "q qᵀ[", "the new Q"),
    ("powersgd", lambda m, q: (lambda p, n, old: (p @ n.T, 2 * n))(*products(m, q)), "4 times", "the new Q"),
]  # fmt: skip


@pytest.mark.quick(3)
@pytest.mark.parametrize(("name", "answer", "words", "hint"), MISTAKES)
def test_a_typical_mistake_is_told_what_it_is(name: str, answer: Any, words: str, hint: str) -> None:
    assert_told(grade(answer, name), words, hint)


def test_a_new_q_is_checked_at_every_rank() -> None:
    """Where one column is right and the other is not, and where ranks did not average theirs."""

    def last_column(m: Any, q: Any) -> tuple[Any, Any]:
        p, new, _ = products(m, q)
        other = new.copy()
        other[:, 1:] *= 2
        return p @ new.T, other

    def own(m: Any, q: Any) -> tuple[Any, Any]:
        p, new, _ = products(m, q)
        return p @ new.T, m[0].T @ p

    for answer in (last_column, own):
        assert "2 ranks, 8 x 6, approximated at rank 2: q qᵀ[" in grade(answer, "powersgd").failures[0].counted


def test_every_orthonormal_basis_is_as_good() -> None:
    def other_basis(m: Any, q: Any) -> tuple[Any, Any]:
        p = np.linalg.svd(np.mean([one @ q for one in m], axis=0), full_matrices=False)[0]
        new = np.mean([one.T @ p for one in m], axis=0)
        return p @ new.T, new

    assert grade(other_basis, "powersgd").passed
