"""Exercise 41: counts say what goes where, and what each received row is for."""

from __future__ import annotations

import numpy as np

from zerosim.grading import Array


def my_dispatch(
    counts: Array,
    rank: int,
) -> tuple[Array, Array, Array]:
    ranks, experts = counts.shape
    by_rank = counts.reshape(ranks, ranks, experts // ranks)
    mine = by_rank[:, rank]
    local = np.tile(np.arange(experts // ranks), ranks)
    expert_of_row = np.repeat(local, mine.ravel())
    order = np.argsort(expert_of_row, kind="stable")
    return by_rank[rank].sum(axis=1), mine.sum(axis=1), order
