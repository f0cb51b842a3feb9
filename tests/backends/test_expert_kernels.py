"""Kernels of experts on every backend, against plain float64 formulas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from kernel_cases import Case, Values, check, every_case, softmax

from zerosim.backends.forms import Choice
from zerosim.backends.kernels import Backend
from zerosim.dtypes import FLOATING, DType, fp32, fp64, int64

every_backend = pytest.mark.parametrize("backend", ["numpy", "cuda"], indirect=True)
RNG = np.random.default_rng(3)
TOKENS, EXPERTS, K = 37, 12, 3
CHOICES = {
    "softmax": Choice(),
    "normed": Choice(normed=True, scale=2.5),
    "sigmoid": Choice("sigmoid", normed=True),
    "of chosen": Choice("softmax of chosen"),
    "groups": Choice("sigmoid", groups=4, chosen=2, best=2, normed=True),
    "best group": Choice(groups=3, chosen=1),
    "given": Choice(given=(TOKENS, *[10] * 6, *[3] * 4, 2)),
}


def chosen_ids(logits: Values, bias: Values | None, how: Choice) -> Values:
    """The k best experts, one token at a time, as a reader would choose them."""
    scores = logits if how.scores == "softmax of chosen" else softmax(logits)
    scores = 1 / (1 + np.exp(-logits)) if how.scores == "sigmoid" else scores
    by = scores if bias is None else scores + bias
    ids = np.empty((len(logits), K), np.int64)
    for token, row in enumerate(by):
        allowed = set(range(EXPERTS))
        if how.groups > how.chosen:
            parts = row.reshape(how.groups, -1)
            sums = np.sort(parts, axis=1)[:, -how.best :].sum(1)
            kept = np.argsort(-sums, kind="stable")[: how.chosen]
            allowed = {e for e in allowed if e // parts.shape[1] in kept}
        ids[token] = sorted(allowed, key=lambda e: -row[e])[:K]
    if how.given:
        listed = [expert for expert, rows in enumerate(how.given) for _ in range(rows)]
        ids[...] = [[listed[token + choice * TOKENS] for choice in range(K)] for token in range(TOKENS)]
    return ids


def weights_of(logits: Values, ids: Values, how: Choice) -> Values:
    scores = 1 / (1 + np.exp(-logits)) if how.scores == "sigmoid" else softmax(logits)
    found = np.take_along_axis(scores, ids, 1)
    if how.scores == "softmax of chosen":
        found = softmax(np.take_along_axis(logits, ids, 1))
    return (found / found.sum(1, keepdims=True) if how.normed else found) * how.scale


def route_backward(grad: Values, logits: Values, ids: Values, how: Choice) -> Values:
    """By differences of the weights."""
    out = np.empty_like(logits)
    for e in range(EXPERTS):
        step = np.zeros_like(logits)
        step[:, e] = 1e-5
        apart = weights_of(logits + step, ids, how) - weights_of(logits - step, ids, how)
        out[:, e] = (grad * apart).sum(1) / 2e-5
    return out


def losses_backward(logits: Values, loads: Values, scores: str) -> Values:
    """By differences of the losses, one token at a time."""

    def loss(x: Values) -> Values:
        probs = softmax(x)
        if scores == "sigmoid":
            probs = (1 / (1 + np.exp(-x))) / (1 / (1 + np.exp(-x))).sum(1, keepdims=True)
        lse = np.log(np.exp(x).sum(1))
        return 0.3 * (probs * loads.repeat(len(x) // len(loads), 0)).sum(1) + 0.35 * lse**2

    out = np.empty_like(logits)
    for e in range(EXPERTS):
        step = np.zeros_like(logits)
        step[:, e] = 1e-5
        out[:, e] = (loss(logits + step) - loss(logits - step)) / 2e-5
    return out


def cases() -> Iterator[Case]:
    logits = 2 * RNG.standard_normal((TOKENS, EXPERTS))
    grad = RNG.standard_normal((TOKENS, K))
    for name, how in CHOICES.items():
        ids = chosen_ids(logits, None, how)
        yield Case(
            f"route_backward, {name}",
            lambda k, g, x, ids, out, how=how: k.route_backward(g, x, ids, how, out),
            lambda g, x, ids, how=how: route_backward(g, x, ids, how),
            [grad, logits, ids], [logits.shape], tolerance=1e7,
        )  # fmt: skip
    rows, order = RNG.standard_normal((TOKENS * K, 10)), RNG.permutation(TOKENS * K)
    x = RNG.standard_normal((TOKENS, 10))
    yield Case(
        "take_rows", lambda k, x, o, out: k.take_rows(x, o, K, out), lambda x, o: x[o // K], [x, order], [rows.shape]
    )

    def summed(rows: Values, order: Values) -> Values:
        out = np.zeros((TOKENS, rows.shape[1]))
        np.add.at(out, order // K, rows)
        return out

    yield Case("sum_rows", lambda k, r, o, out: k.sum_rows(r, o, K, out), summed, [rows, order], [x.shape])
    some = rows[: len(rows) // 2], order[: len(rows) // 2]
    yield Case("sum_rows, some", lambda k, r, o, out: k.sum_rows(r, o, K, out), summed, [*some], [x.shape])
    beyond = np.append(order[:50], [TOKENS * K] * 5)
    expected = np.concatenate([x[order[:50] // K], np.zeros((5, 10))])
    yield Case(
        "take_rows, padded", lambda k, x, o, out: k.take_rows(x, o, K, out), lambda x, o:
        np.concatenate([x[o[:50] // K], np.zeros((5, 10))]), [x, beyond], [expected.shape],
    )  # fmt: skip
    ids = RNG.integers(0, EXPERTS, (36, K))
    yield Case(
        "count_choices", lambda k, ids, out: k.count_choices(ids, out),
        lambda ids: np.stack([np.bincount(run, minlength=EXPERTS) for run in ids.reshape(4, -1)]),
        [ids], [(4, EXPERTS)],
    )  # fmt: skip
    loads = RNG.integers(0, 5, (4, EXPERTS)).astype(float)
    for scores in ("softmax", "sigmoid"):
        yield Case(
            f"router_losses_backward, {scores}",
            lambda k, x, loads, out, s=scores: k.router_losses_backward(x, loads, s, 0.3, 0.7, out),
            lambda x, loads, s=scores: losses_backward(x, loads, s), [logits[:36], loads], [(36, EXPERTS)],
            tolerance=1e7,
        )  # fmt: skip
    weights = RNG.standard_normal((TOKENS * K, 1))
    yield Case("weigh_rows", lambda k, *a: k.weigh_rows(*a), lambda r, w: r * w, [rows, weights], [rows.shape])
    yield Case(
        "weigh_rows_backward", lambda k, *a: k.weigh_rows_backward(*a),
        lambda g, r, w: [g * w, (g * r).sum(1, keepdims=True)],
        [RNG.standard_normal(rows.shape), rows, weights], [rows.shape, weights.shape],
    )  # fmt: skip
    counts = (5, 0, 31, TOKENS * K - 36)
    stack = RNG.standard_normal((4, 10, 7))

    def each(rows: Values, stack: Values) -> Values:
        return np.concatenate([a @ b for a, b in zip(np.split(rows, np.cumsum(counts)[:-1]), stack, strict=True)])

    yield Case("grouped", lambda k, r, s, out: k.grouped(r, s, counts, out), each, [rows, stack], [(len(rows), 7)])
    yield Case(
        "grouped, transposed", lambda k, r, s, out: k.grouped(r, s.swapaxes(1, 2), counts, out),
        lambda r, s: each(r, s.swapaxes(1, 2)), [RNG.standard_normal((len(rows), 7)), stack], [rows.shape],
    )  # fmt: skip

    def by_expert(left: Values, right: Values) -> Values:
        ends = np.cumsum(counts)[:-1]
        return np.stack([a.T @ b / 2 for a, b in zip(np.split(left, ends), np.split(right, ends), strict=True)])

    yield Case(
        "grouped_wgrad", lambda k, a, b, out: k.grouped_wgrad(a, b, counts, 0.5, out), by_expert,
        [rows, RNG.standard_normal((len(rows), 7))], [(4, 10, 7)],
    )  # fmt: skip
    order = [3, 0, 2, 1]
    yield Case(
        "move_rows", lambda k, r, out: k.move_rows(r, counts, order, out),
        lambda r: np.concatenate([np.split(r, np.cumsum(counts)[:-1])[chunk] for chunk in order]), [rows], [rows.shape],
    )  # fmt: skip


@every_case(FLOATING, FLOATING, [*cases()])
def test_kernels_are_their_formulas(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    for dtype in dtypes:
        check(backend, case, dtype, *case.run(backend, dtype))


@pytest.mark.parametrize("how", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@every_backend
def test_a_router_chooses_the_best_and_weighs_them_without_the_bias(
    backend: Backend, how: Choice, biased: bool
) -> None:
    logits, bias = 2 * RNG.standard_normal((TOKENS, EXPERTS)), RNG.standard_normal(EXPERTS) if biased else None
    expected = chosen_ids(logits, bias, how)
    for dtype, apart in ((fp64, 1e-12), (fp32, 1e-5)):
        weights, ids = routed(backend, logits, bias, how, dtype)
        assert (ids == expected).all()
        np.testing.assert_allclose(weights, weights_of(logits, expected, how), rtol=apart, atol=apart)


def routed(backend: Backend, logits: Values, bias: Values | None, how: Choice, dtype: DType) -> tuple[Values, Values]:
    given = backend.empty(logits.shape, dtype)
    backend.from_host(logits, given)
    added = None if bias is None else backend.empty(bias.shape, dtype)
    if bias is not None:
        backend.from_host(bias, added)
    weights, ids = backend.empty((len(logits), K), dtype), backend.empty((len(logits), K), int64)
    backend.route(given, added, how, weights, ids)
    return np.asarray(backend.to_host(weights)), np.asarray(backend.to_host(ids))


@every_backend
def test_rows_are_sorted_by_expert_and_keep_their_order(backend: Backend) -> None:
    ids = RNG.integers(0, EXPERTS - 1, (TOKENS, K))
    given = backend.empty(ids.shape, int64)
    backend.from_host(ids, given)
    order, counts = backend.empty((ids.size,), int64), backend.empty((EXPERTS,), int64)
    backend.sort_rows(given, order, counts)
    assert (backend.to_host(order) == np.argsort(ids.reshape(-1), kind="stable")).all()
    assert (backend.to_host(counts) == np.bincount(ids.reshape(-1), minlength=EXPERTS)).all()


@every_backend
@pytest.mark.parametrize("weighed", [False, True], ids=["position", "weight"])
@pytest.mark.parametrize("padded", [False, True], ids=["short", "padded"])
def test_an_expert_keeps_so_many_rows(backend: Backend, weighed: bool, padded: bool) -> None:
    ids, most = RNG.integers(0, EXPERTS - 2, (TOKENS, K)), 8
    order, counts = np.argsort(ids.reshape(-1), kind="stable"), np.bincount(ids.reshape(-1), minlength=EXPERTS)
    weights = np.round(RNG.standard_normal((TOKENS, K)), 1)  # some are equal
    expected = list[int]()
    for rows in np.split(order, np.cumsum(counts)[:-1]):
        best = sorted(range(len(rows)), key=lambda r: -weights.reshape(-1)[rows[r]] if weighed else r)[:most]
        kept = [int(rows[r]) for r in sorted(best)]
        expected += kept + [ids.size] * (most - len(kept)) * padded
    given = [backend.empty(a.shape, int64 if a.dtype.kind == "i" else fp32) for a in (order, counts, weights)]
    for array, values in zip(given, (order, counts, weights), strict=True):
        backend.from_host(values, array)
    out = backend.empty((len(expected),), int64)
    backend.keep_rows(given[0], given[1], given[2] if weighed else None, most, padded, out)
    assert backend.to_host(out).tolist() == expected
