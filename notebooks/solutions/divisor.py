"""Exercise 42: two groups, one divisor."""

from __future__ import annotations

from zerosim.grading import Array


def my_average(
    grads: list[tuple[Array, Array]],
    ep: int,
) -> list[tuple[Array, Array]]:
    ranks = len(grads)
    dense = sum(of_rank for of_rank, _ in grads) / ranks
    experts = [sum(of_rank for _, of_rank in grads[index::ep]) / ranks for index in range(ep)]
    return [(dense, experts[rank % ep]) for rank in range(ranks)]
