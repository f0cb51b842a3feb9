"""Exercise 40: the bias chooses, scores weigh, and the load of all ranks moves the bias."""

from __future__ import annotations

import numpy as np

from zerosim.grading import Array


def my_bias(
    scores: Array,
    bias: Array,
    top_k: int,
    rate: float,
) -> tuple[Array, Array]:
    ids = np.argsort(-(scores + bias), axis=2)[..., :top_k]
    weights = np.take_along_axis(scores, ids, 2)
    load = np.bincount(ids.ravel(), minlength=len(bias))
    return weights / weights.sum(axis=2, keepdims=True), bias + rate * np.sign(load.mean() - load)
