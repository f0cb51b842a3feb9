"""Experts in NumPy: the choice of experts, rows sorted by expert, and a product of each expert's rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from zerosim.backends.forms import Choice
from zerosim.backends.kernels import Array
from zerosim.backends.numpy.cast import raised, result_for, round_into, store, wide
from zerosim.backends.numpy.products import product


def _softmax(x: Array) -> Array:
    y = np.exp(x - x.max(axis=1, keepdims=True))
    return y / y.sum(axis=1, keepdims=True)


def _scores(logits: Array, how: Choice) -> Array:
    x = raised(logits)
    if how.scores == "softmax":
        return _softmax(x)
    return 1.0 / (1.0 + np.exp(-x)) if how.scores == "sigmoid" else x


def _best(scores: Array, count: int) -> Array:
    """Return the places of the largest ones of each row, the largest first; of equal ones the first."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]


def _in_groups(scores: Array, how: Choice) -> Array:
    """Return the scores, -inf outside of the best groups."""
    grouped = scores.reshape(len(scores), how.groups, -1)
    sums = np.sort(grouped, axis=2)[:, :, -how.best :].sum(axis=2)
    left = np.full_like(grouped, -np.inf)
    kept = _best(sums, how.chosen)[:, :, None]
    np.put_along_axis(left, kept, np.take_along_axis(grouped, kept, 1), 1)
    return left.reshape(scores.shape)


def route(logits: Array, bias: Array | None, how: Choice, weights: Array, ids: Array) -> None:
    scores = _scores(logits, how)
    if how.given:
        ids[...] = np.repeat(np.arange(len(how.given)), how.given).reshape(ids.shape[::-1]).T
    else:
        by = scores if bias is None else scores + raised(bias)
        ids[...] = _best(by if how.groups == how.chosen else _in_groups(by, how), ids.shape[1])
    chosen = np.take_along_axis(scores, ids, 1)
    if how.scores == "softmax of chosen":
        chosen = _softmax(chosen)
    if how.normed:
        chosen = chosen / chosen.sum(axis=1, keepdims=True)
    store(chosen * how.scale if how.scale != 1.0 else chosen, weights)


def route_backward(grad: Array, logits: Array, ids: Array, how: Choice, dlogits: Array) -> None:
    scores, g = _scores(logits, how), raised(grad) * how.scale
    chosen = np.take_along_axis(scores, ids, 1)
    if how.scores == "softmax of chosen":
        chosen = _softmax(chosen)
    if how.normed:
        total = chosen.sum(axis=1, keepdims=True)
        g = (g - (g * chosen).sum(axis=1, keepdims=True) / total) / total
    if how.scores == "softmax of chosen":
        g = chosen * (g - (g * chosen).sum(axis=1, keepdims=True))
    found = np.zeros_like(scores)
    np.put_along_axis(found, ids, g, 1)
    if how.scores == "sigmoid":
        found = found * scores * (1.0 - scores)
    elif how.scores == "softmax":
        found = scores * (found - (found * scores).sum(axis=1, keepdims=True))
    store(found, dlogits)


def sort_rows(ids: Array, order: Array, counts: Array) -> None:
    flat = ids.reshape(-1)
    order[...] = np.argsort(flat, kind="stable")
    counts[...] = np.bincount(flat, minlength=len(counts))


def keep_rows(order: Array, counts: Array, weights: Array | None, most: int, padded: bool, out: Array) -> None:
    by, at = None if weights is None else raised(weights).reshape(-1), 0
    if padded:
        out[...] = len(order)
    for expert, of in _each(counts.tolist()):
        rows = order[of]
        if len(rows) > most:
            kept = np.arange(most) if by is None else np.sort(np.argsort(-by[rows], kind="stable")[:most])
            rows = rows[kept]
        at = expert * most if padded else at
        out[at : at + len(rows)] = rows
        at += len(rows)


def take_rows(x: Array, order: Array, each: int, out: Array) -> None:
    token = order // each
    store(x[np.minimum(token, len(x) - 1)], out)
    out[token >= len(x)] = 0


def count_choices(ids: Array, out: Array) -> None:
    for run, of_run in zip(ids.reshape(len(out), -1), out, strict=True):
        of_run[...] = np.bincount(run, minlength=out.shape[1])


def router_losses_backward(
    logits: Array, loads: Array, scores: str, balance: float, size: float, dlogits: Array
) -> None:
    x, runs = raised(logits), len(loads)
    probs = _softmax(x)
    grad = np.repeat(balance * raised(loads), len(x) // runs, axis=0).astype(x.dtype, copy=False)
    top = x.max(axis=1, keepdims=True)
    found = size * (top + np.log(np.exp(x - top).sum(axis=1, keepdims=True))) * probs
    if scores == "sigmoid":
        each = 1.0 / (1.0 + np.exp(-x))
        total = each.sum(axis=1, keepdims=True)
        found += (grad - (grad * each).sum(axis=1, keepdims=True) / total) / total * each * (1.0 - each)
    else:
        found += probs * (grad - (grad * probs).sum(axis=1, keepdims=True))
    store(found, dlogits)


def sum_rows(rows: Array, order: Array, each: int, out: Array) -> None:
    total = np.zeros(out.shape, wide(rows))
    by_choice = np.argsort(order, kind="stable")
    token, choice = np.divmod(order[by_choice], each)
    for one in range(each):  # no token has two rows of one choice
        of = (choice == one) & (token < len(out))
        total[token[of]] += raised(rows[by_choice[of]])
    store(total, out)


def weigh_rows(rows: Array, weights: Array, out: Array) -> None:
    store(raised(rows) * raised(weights), out)


def weigh_rows_backward(grad: Array, rows: Array, weights: Array, drows: Array, dweights: Array) -> None:
    g = raised(grad)
    store(np.einsum("rd,rd->r", g, raised(rows))[:, None], dweights)
    store(g * raised(weights), drows)


def _each(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield each expert with its rows."""
    for expert, stop in enumerate(accumulate(counts)):
        yield expert, slice(stop - counts[expert], stop)


def grouped(rows: Array, stack: Array, counts: Sequence[int], out: Array) -> None:
    compute = wide(rows, stack)
    for expert, of in _each(counts):
        result = result_for(out[of], compute)
        product(raised(rows[of]), raised(stack[expert]), out=result)
        round_into(result, out[of])


def grouped_wgrad(left: Array, right: Array, counts: Sequence[int], scale: float, dstack: Array) -> None:
    compute = wide(left, right)
    for expert, of in _each(counts):
        result = result_for(dstack[expert], compute)
        product(raised(left[of]).T, raised(right[of]), out=result)
        if scale != 1.0:
            result *= scale
        round_into(result, dstack[expert])


def move_rows(rows: Array, chunks: Sequence[int], order: Sequence[int], out: Array) -> None:
    runs, at = [of for _, of in _each(chunks)], 0
    for chunk in order:
        out[at : at + chunks[chunk]] = rows[runs[chunk]]
        at += chunks[chunk]


def add_biases(rows: Array, bias: Array, counts: Sequence[int]) -> None:
    for expert, of in _each(counts):
        store(raised(rows[of]) + raised(bias[expert]), rows[of])


def sum_biases(rows: Array, counts: Sequence[int], scale: float, dbias: Array) -> None:
    for expert, of in _each(counts):
        store(raised(rows[of]).sum(axis=0) * scale, dbias[expert])


def clamped_swiglu(x: Array, alpha: float, limit: float, out: Array) -> None:
    gate, up = _clamped(x, limit)
    store(gate / (1.0 + np.exp(-alpha * gate)) * (up + 1.0), out)


def clamped_swiglu_backward(grad: Array, x: Array, alpha: float, limit: float, dx: Array) -> None:
    (gate, up), g = _clamped(x, limit), raised(grad)
    share = 1.0 / (1.0 + np.exp(-alpha * gate))
    wide_x = raised(x)
    dgate = g * (up + 1.0) * share * (1.0 + alpha * gate * (1.0 - share))
    store(np.where(wide_x[:, ::2] > limit, 0.0, dgate), dx[:, ::2])
    store(np.where(np.abs(wide_x[:, 1::2]) > limit, 0.0, g * gate * share), dx[:, 1::2])


def _clamped(x: Array, limit: float) -> tuple[Array, Array]:
    return np.minimum(raised(x[:, ::2]), limit), np.clip(raised(x[:, 1::2]), -limit, limit)
