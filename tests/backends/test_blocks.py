"""Attention by blocks of keys, on every backend: merged in any order it is the attention to all keys at once, and the
parts of its gradients add up to the whole. The whole is NumPy's flash kernel in float64, which has formulas of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import Case, Values, bits, check, dtype_of, every_case, put

from zerosim.backends.forms import Scores
from zerosim.backends.kernels import Backend, Dropout, Heads, Met
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.dtypes import FLOATING, DType, bf16, compute_dtype, fp32
from zerosim.placement.context import ContextCut

KEY = (123, 456)
B, T, WIDTH = 2, 144, 4
FORMS = {
    "plain": Scores(),
    "large": Scores(scale=5.0),  # exp of the scores overflows
    "capped": Scores(cap=2.0),
    "with slopes": Scores(alibi=1.0),
    "in windows": Scores(window=13),
    "both ways": Scores(causal=False),
    "all at once": Scores(0.4, 3.0, 0.3, 70),
}
CUTS = {"whole": ContextCut(), "in turn": ContextCut(2), "zig-zag": ContextCut(3, zigzag=True)}
Sources = tuple[int, ...]


def orders(cut: ContextCut, gathered: bool) -> Iterator[tuple[int, list[Sources]]]:
    """Each place, and whose keys it meets at a time: those of one after the other, from itself back, or all at once."""
    for place in range(cut.around):
        ring = [((place - step) % cut.around,) for step in range(cut.around)]
        yield place, [tuple(range(cut.around))] if gathered else ring


def met(cut: ContextCut, place: int, sources: Sources) -> Met:
    return Met(cut.at(T, place), tuple(run for source in sources for run in cut.at(T, source)), T)


def move(k: Backend, whole: Any, own: Any, runs: Sequence[range], back: bool = False) -> None:
    """Copy the tokens of these runs, along the second dim, into an array of theirs, end to end; or back."""
    first = 0
    for run in runs:
        pair = whole[:, run.start : run.stop], own[:, first : first + len(run)]
        k.copy(*(reversed(pair) if back else pair))
        first += len(run)


def taken(k: Backend, whole: Any, runs: Sequence[range]) -> Any:
    own = k.empty((whole.shape[0], sum(map(len, runs)), whole.shape[2]), dtype_of(k, whole))
    move(k, whole, own, runs)
    return own


def taken_by_head(k: Backend, whole: Any, runs: Sequence[range]) -> Any:
    """Of (B, H, T); the copy is contiguous, as a kernel's own array is."""
    by_token = taken(k, whole.transpose(0, 2, 1), runs)
    own = k.empty((whole.shape[0], whole.shape[1], by_token.shape[1]), dtype_of(k, whole))
    k.copy(by_token.transpose(0, 2, 1), own)
    return own


def forward(k: Any, qkv: Any, out: Any, lse: Any, *, of: Heads, chance: float, cut: ContextCut, gathered: bool) -> None:
    first = of.queries * WIDTH
    for place, order in orders(cut, gathered):
        here = cut.at(T, place)
        q = taken(k, qkv, here)[..., :first]  # strided, as in q|k|v
        own, sums = taken(k, out, here), taken_by_head(k, lse, here)
        k.fill(own, 0.0)
        k.fill(sums, -np.inf)
        for sources in order:
            where = met(cut, place, sources)
            k.attention_block(q, taken(k, qkv[..., first:], where.keys), of, where, Dropout(KEY, chance), own, sums)
        move(k, out, own, here, back=True)
        move(k, lse.transpose(0, 2, 1), sums.transpose(0, 2, 1), here, back=True)


def backward(
    k: Any, grad: Any, qkv: Any, out: Any, lse: Any, delta: Any, dqkv: Any,
    *, of: Heads, chance: float, cut: ContextCut, gathered: bool,
) -> None:  # fmt: skip
    first = of.queries * WIDTH
    k.attention_delta(grad, out, of, delta)
    k.fill(dqkv, 0.0)
    for place, order in orders(cut, gathered):
        here = cut.at(T, place)
        q, g, dq = taken(k, qkv, here)[..., :first], taken(k, grad, here), taken(k, dqkv[..., :first], here)
        rows = taken_by_head(k, lse, here), taken_by_head(k, delta, here)
        for sources in order:
            where = met(cut, place, sources)
            kv, dkv = (taken(k, a[..., first:], where.keys) for a in (qkv, dqkv))
            k.attention_block_backward(g, q, kv, of, where, Dropout(KEY, chance), *rows, dq, dkv)
            move(k, dqkv[..., first:], dkv, where.keys, back=True)
        move(k, dqkv[..., :first], dq, here, back=True)


def whole(qkv: Values, of: Heads, chance: float) -> list[Values]:
    """NumPy's flash kernel: the result and the log-sum-exp."""
    out, lse = np.empty((B, T, of.queries * WIDTH)), np.empty((B, of.queries, T))
    NumpyBackend().flash_attention(qkv, of, Dropout(KEY, chance), out, lse)
    return [out, lse]


def whole_backward(grad: Values, qkv: Values, out: Values, lse: Values, of: Heads, chance: float) -> list[Values]:
    delta, dqkv = np.empty(lse.shape), np.empty(qkv.shape)
    NumpyBackend().flash_attention_backward(grad, qkv, of, Dropout(KEY, chance), out, lse, delta, dqkv)
    return [delta, dqkv]


def cases() -> Iterator[Case]:
    rng = np.random.default_rng(3)
    loose: dict[str, Any] = {"tolerance": 200.0, "halves": 3.0}
    for name, form in FORMS.items():
        of = Heads(6, 2, 3, 12, form) if form.alibi else Heads(6, 2, form=form)
        qkv, grad = rng.standard_normal((B, T, of.packed * WIDTH)), rng.standard_normal((B, T, of.queries * WIDTH))
        ways = [(way, gathered) for way in CUTS for gathered in (False, True) if way != "whole" or not gathered]
        for way, gathered in ways if name in ("plain", "all at once") else [("zig-zag", False)]:
            chance = 0.2 if way == "zig-zag" else 0.0
            how: dict[str, Any] = {"of": of, "chance": chance}
            cut: dict[str, Any] = {"cut": CUTS[way], "gathered": gathered}
            out, lse = whole(qkv, of, chance)
            title = f"{name} {way}{' gathered' if gathered else ''}"
            yield Case(
                f"attention_block {title}",
                lambda k, *a, how=how, cut=cut: forward(k, *a, **how, **cut),
                lambda q, how=how: whole(q, **how),
                [qkv],
                [out.shape, lse.shape],
                compute=(0, 1),
                **loose,
            )
            yield Case(
                f"attention_block_backward {title}",
                lambda k, *a, how=how, cut=cut: backward(k, *a, **how, **cut),
                lambda *a, how=how: whole_backward(*a, **how),
                [grad, qkv, out, lse],
                [lse.shape, qkv.shape],
                compute=(0, 1),
                states=(3,),
                **loose,
            )


CASES = list(cases())


@pytest.mark.quick(10)
@every_case(FLOATING, FLOATING, CASES)
def test_blocks_are_the_whole(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    for dtype in dtypes:
        check(backend, case, dtype, *case.run(backend, dtype))


SIZES = {"numpy": ("attention.SCORES", "blocks.QUERIES"), "cuda": ("tiles.SCORES", "tiles.QUERIES")}


@pytest.mark.parametrize("scores", [700, 3000])
@every_case([fp32], [fp32, bf16], [case for case in CASES if case.name.endswith("all at once zig-zag")])
def test_small_parts_are_the_whole(
    backend: Backend, case: Case, dtypes: Sequence[DType], scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence at a time, and one key-value head, or both."""
    for name, size in zip(SIZES[backend.name], (scores, 16), strict=True):
        monkeypatch.setattr(f"zerosim.backends.{backend.name}.{name}", size)
    for dtype in dtypes:
        check(backend, case, dtype, *case.run(backend, dtype))


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_arrays_may_be_strided(backend: Backend, dtype: DType) -> None:
    of, rng, dropout = Heads(6, 2, form=Scores(cap=2.0, window=15)), np.random.default_rng(9), Dropout(KEY, 0.3)
    where = Met((range(10, 20), range(50, 60)), (range(5, 15), range(40, 50)), 70)
    values = [rng.standard_normal((2, 20, n)) for n in (24, 24, 24, 16, 24, 16)]
    rows = [rng.standard_normal((2, 6, 20)) for _ in range(2)]
    results = []
    for strided in (False, True):
        grad, y, q, kv, dq, dkv = (
            put(backend, x, t, strided=strided)
            for x, t in zip(values, [dtype] * 4 + [compute_dtype(dtype)] * 2, strict=True)
        )
        out, (lse, delta) = (
            put(backend, values[0], compute_dtype(dtype), strided=strided),
            (put(backend, x, compute_dtype(dtype), strided=strided) for x in rows),
        )
        backend.attention_block(q, kv, of, where, dropout, out, lse)
        backend.attention_delta(grad, y, of, delta)
        backend.attention_block_backward(grad, q, kv, of, where, dropout, lse, delta, dq, dkv)
        results.append([backend.to_host(a) for a in (out, lse, delta, dq, dkv)])
    for here, there in zip(*results, strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [Scores(), Scores(window=5)], ids=str)
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_a_query_that_reads_no_key_changes_nothing(backend: Backend, dtype: DType, form: Scores) -> None:
    """Keys of the past are out of the reach of all queries but the first four, or of none; those to come, of all."""
    of, rng, draw = Heads(6, 2, form=form), np.random.default_rng(8), compute_dtype(dtype)
    queries, past, future = range(40, 60), range(20, 40), range(60, 80)
    q, kv, grad = (put(backend, rng.standard_normal((2, 20, n)), dtype) for n in (24, 16, 24))
    values = rng.standard_normal((2, 20, 24)), rng.standard_normal((2, 6, 20))
    for before in (values, (np.zeros((2, 20, 24)), np.full((2, 6, 20), -np.inf))):
        for keys in (past, future):
            reads = len(queries) if keys is past and not form.window else 4 if keys is past else 0
            where, dropout = Met((queries,), (keys,), 90), Dropout(KEY, 0.3)
            out, lse = (put(backend, x, draw) for x in before)
            backend.attention_block(q, kv, of, where, dropout, out, lse)
            assert [bits(backend, out[:, reads:]), bits(backend, lse[..., reads:])] == [
                bits(backend, put(backend, x, draw)) for x in (before[0][:, reads:], before[1][..., reads:])
            ]
            assert not any(np.isnan(backend.to_host(a)).any() for a in (out, lse))
            ended, delta, dq, dkv = (
                put(backend, np.full(s, 2.0), draw) for s in ((2, 6, 20), (2, 6, 20), (2, 20, 24), (2, 20, 16))
            )
            backend.attention_block_backward(grad, q, kv, of, where, dropout, ended, delta, dq, dkv)
            assert (backend.to_host(dq[:, reads:]) == 2).all()
            assert np.isfinite(backend.to_host(dkv)).all()
            assert (backend.to_host(dkv) == 2).all() == (reads == 0)


# -- which queries and keys meet ------------------------------------------------------------------------------
@st.composite
def meetings(draw: Any) -> tuple[Met, Scores]:
    """Runs of a row in any order; queries and keys may be the same ones, others, or both. The row may hold several
    documents."""
    tokens = draw(st.integers(1, 40))

    def runs() -> tuple[range, ...]:
        stops = sorted(draw(st.sets(st.integers(0, tokens), min_size=2, max_size=6)))
        found = [range(a, b) for a, b in pairwise(stops)]
        return tuple(draw(st.permutations(found)))[: draw(st.integers(1, len(found)))]

    window = draw(st.integers(0, tokens + 1))
    starts = tuple(sorted(draw(st.sets(st.integers(1, tokens), max_size=4))))
    return Met(runs(), runs(), tokens, starts), Scores(window=window, causal=bool(window) or draw(st.booleans()))


def reads(form: Scores, query: int, key: int, starts: Sequence[int]) -> bool:
    if any(min(query, key) < start <= max(query, key) for start in starts):
        return False
    return not form.causal or (key <= query and not (form.window and key <= query - form.window))


@given(meetings(), st.integers(1, 9))
def test_what_meets_is_what_an_enumeration_finds(case: tuple[Met, Scores], most: int) -> None:
    where, form = case
    queries, keys = ([i for run in runs for i in run] for runs in (where.queries, where.keys))
    read = {(i, j) for i, q in enumerate(queries) for j, k in enumerate(keys) if reads(form, q, k, where.starts)}
    assert where.pairs(form) == len(read)
    wasted = len(set(queries) & set(keys))
    assert where.counted(form) == (
        2 * len(read) - wasted if form.causal and not form.reach(where.tokens) else len(read)
    )
    seen = []
    for tile in where.tiles(form, most):
        rows, columns = range(*tile.rows.indices(len(queries))), range(*tile.keys.indices(len(keys)))
        assert 0 < len(rows) <= most
        assert [queries[i] for i in rows] == list(range(tile.query, tile.query + len(rows)))
        assert [keys[j] for j in columns] == list(range(tile.key, tile.key + len(columns)))
        assert all(any((i, j) in read for i in rows) for j in columns)
        seen += [(i, j) for i in rows for j in columns]
    assert len(seen) == len(set(seen))
    assert read <= set(seen)


@pytest.mark.parametrize("form", [Scores(), Scores(window=20), Scores(causal=False)], ids=str)
@pytest.mark.parametrize("cut", CUTS.values(), ids=list(CUTS))
def test_all_places_together_count_what_one_kernel_over_the_row_does(cut: ContextCut, form: Scores) -> None:
    ring = [met(cut, place, sources) for place, order in orders(cut, False) for sources in order]
    together = [met(cut, place, order[0]) for place, order in orders(cut, True)]
    for every in (ring, together):
        assert sum(where.counted(form) for where in every) == form.pairs(T)
