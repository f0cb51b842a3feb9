"""The two ends of a language model in NumPy: token embedding and cross-entropy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from zerosim.backends.kernels import Array
from zerosim.backends.numpy.cast import land, landing, raised, row_blocks, wide
from zerosim.backends.numpy.products import product


def embedding(ids: Array, weight: Array, out: Array) -> None:
    rows = landing(out, weight.dtype)
    np.take(weight, ids, axis=0, out=rows, mode="clip")  # ids are in range; "raise" would copy `out` to be safe
    land(rows, out)


def embedding_backward(grad: Array, ids: Array, dweight: Array) -> None:
    """Sort the rows by id, keeping the order of equal ids, and add up each run as a product with ones.

    One product with a one-hot matrix would be simpler, but 0 * inf is nan: one bad row would spoil all.
    """
    dweight[...] = 0
    ids = ids.reshape(-1)
    order = np.argsort(ids, kind="stable")
    found, starts = np.unique(ids[order], return_index=True)
    rows = raised(grad.reshape(ids.size, dweight.shape[1]))[order]
    ones = np.ones(ids.size, rows.dtype)
    sums = np.empty((found.size, dweight.shape[1]), rows.dtype)
    for i, (start, end) in enumerate(pairwise([*starts.tolist(), ids.size])):
        product(ones[start:end], rows[start:end], out=sums[i])
    rounded = landing(sums, dweight.dtype)
    land(sums, rounded)
    dweight[found] = rounded


def cross_entropy(logits: Array, targets: Array, losses: Array, lse: Array) -> None:
    ones = np.ones(logits.shape[1], wide(logits))
    for rows in row_blocks(*logits.shape):
        block = raised(logits[rows])
        top = block.max(axis=1)
        shifted = block - top[:, None]
        sums = product(np.exp(shifted, out=shifted), ones)
        np.add(np.log(sums), top, out=lse[rows])
        picked = block[np.arange(len(block)), targets[rows]]
        np.subtract(lse[rows], picked, out=losses[rows])


def cross_entropy_backward(logits: Array, targets: Array, lse: Array, scale: float, count: int, dlogits: Array) -> None:
    compute = wide(logits)
    for rows in row_blocks(*logits.shape):
        result = landing(dlogits[rows], compute)
        np.subtract(raised(logits[rows]), lse[rows, None], out=result)
        np.exp(result, out=result)
        result[np.arange(len(result)), targets[rows]] -= 1.0
        result *= scale
        result /= count
        land(result, dlogits[rows])
