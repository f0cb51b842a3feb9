"""The two ends of a language model in NumPy: token embedding, cross-entropy, and labels drawn from logits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from zerosim.backends.forms import PLAIN, Buckets, LogitForm
from zerosim.backends.kernels import Array
from zerosim.backends.numpy.cast import raised, result_for, round_into, row_blocks, wide
from zerosim.backends.numpy.products import product


def embedding(ids: Array, weight: Array, out: Array, first: int = 0) -> None:
    rows = result_for(out, weight.dtype)
    if first:
        ids = ids - first
    np.take(weight, ids, axis=0, out=rows, mode="clip")  # "raise" would copy `out` to be safe
    rows[(ids < 0) | (ids >= len(weight))] = 0
    round_into(rows, out)


def relative_buckets(of: Buckets, out: Array) -> None:
    ahead = np.arange(len(out)) - np.arange(len(out))[:, None]
    apart = np.maximum(-ahead, 0) if of.causal else np.abs(ahead)
    out[...] = np.searchsorted(of.starts, apart, side="right") - 1 + (ahead > 0) * of.later


def embedding_backward(grad: Array, ids: Array, dweight: Array, first: int = 0) -> None:
    """Sort the rows by id, keeping the order of equal ids, and add up each run as a product with ones.

    One product with a one-hot matrix would be simpler, but 0 * inf is nan: one bad row would spoil all.
    """
    dweight[...] = 0
    ids = ids.reshape(-1) - first
    order = np.argsort(ids, kind="stable")
    order = order[(ids[order] >= 0) & (ids[order] < len(dweight))]
    found, starts = np.unique(ids[order], return_index=True)
    rows = raised(grad.reshape(ids.size, dweight.shape[1]))[order]
    ones = np.ones(order.size, rows.dtype)
    sums = np.empty((found.size, dweight.shape[1]), rows.dtype)
    for i, (start, end) in enumerate(pairwise([*starts.tolist(), order.size])):
        product(ones[start:end], rows[start:end], out=sums[i])
    rounded = result_for(sums, dweight.dtype)
    round_into(sums, rounded)
    dweight[found] = rounded


def cross_entropy(logits: Array, targets: Array, losses: Array, lse: Array, form: LogitForm = PLAIN) -> None:
    ones = np.ones(logits.shape[1], wide(logits))
    for rows in row_blocks(*logits.shape):
        block = _formed(logits[rows], form)
        top = block.max(axis=1)
        shifted = block - top[:, None]
        sums = product(np.exp(shifted, out=shifted), ones)
        np.add(np.log(sums), top, out=lse[rows])
        picked = block[np.arange(len(block)), targets[rows]]
        np.subtract(lse[rows], picked, out=losses[rows])
        losses[rows][targets[rows] < 0] = 0


def cross_entropy_shares(
    logits: Array, targets: Array, first: int, top: Array, sums: Array, picked: Array, form: LogitForm = PLAIN
) -> None:
    ones = np.ones(logits.shape[1], wide(logits))
    for rows in row_blocks(*logits.shape):
        block, columns = _formed(logits[rows], form), targets[rows] - first
        here = (columns >= 0) & (columns < logits.shape[1])
        picked[rows] = 0
        picked[rows][here] = block[here, columns[here]]
        shifted = block - top[rows, None]
        sums[rows] = product(np.exp(shifted, out=shifted), ones)
        if (unread := targets[rows] < 0).any():
            sums[rows][unread] = first == 0
            picked[rows][unread] = top[rows][unread] if first == 0 else 0


def cross_entropy_backward(
    logits: Array,
    targets: Array,
    lse: Array,
    scale: float,
    count: float,
    dlogits: Array,
    first: int = 0,
    form: LogitForm = PLAIN,
) -> None:
    compute = wide(logits)
    for rows in row_blocks(*logits.shape):
        formed = _formed(logits[rows], form)
        slope = _slope(formed, form)  # before the result, which may lie over the logits
        result = result_for(dlogits[rows], compute)
        np.subtract(formed, lse[rows, None], out=result)
        np.exp(result, out=result)
        columns = targets[rows] - first
        here = np.flatnonzero((columns >= 0) & (columns < logits.shape[1]))
        result[here, columns[here]] -= 1.0
        result[targets[rows] < 0] = 0
        result *= scale
        result /= count
        if slope is not None:
            result *= slope
        round_into(result, dlogits[rows])


def _formed(logits: Array, form: LogitForm) -> Array:
    """The logits in the compute type, multiplied and capped."""
    values = raised(logits)
    if form.factor != 1.0:
        values = values * form.factor
    if form.cap:
        values = values / form.cap
        np.tanh(values, out=values)
        values *= form.cap
    return values


def _slope(formed: Array, form: LogitForm) -> Array | float | None:
    """The derivative of `formed` by the logits; None: 1."""
    if not form.cap:
        return None if form.factor == 1.0 else form.factor
    slope = formed / form.cap
    slope *= slope
    np.subtract(1.0, slope, out=slope)
    slope *= form.factor
    return slope


def sample_labels(logits: Array, key: tuple[int, int], first: int, labels: Array, form: LogitForm = PLAIN) -> None:
    uniform = np.random.Generator(np.random.Philox(key=np.array(key, np.uint64), counter=first // 4))
    draws = uniform.random(first % 4 + len(labels))[first % 4 :]
    for rows in row_blocks(*logits.shape):
        block = _formed(logits[rows], form)
        shifted = block - block.max(axis=1)[:, None]
        sums = np.cumsum(np.exp(shifted, out=shifted), axis=1, dtype=np.float64)
        below = np.count_nonzero(sums <= draws[rows, None] * sums[:, -1:], axis=1)
        np.minimum(below, logits.shape[1] - 1, out=labels[rows])
