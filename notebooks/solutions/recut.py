"""Exercise 45: join without the old padding, then cut with the new."""

from __future__ import annotations

import numpy as np

from zerosim.grading import Array


def my_recut(
    pieces: list[tuple[int, int, Array]],
    numel: int,
    ranks: int,
) -> list[tuple[int, int, Array]]:
    in_order = sorted(pieces, key=lambda piece: piece[0])
    state = np.concatenate([values for _, _, values in in_order])[:numel]
    size = -(-numel // ranks)
    padded = np.zeros(ranks * size, state.dtype)
    padded[:numel] = state
    starts = [rank * size for rank in range(ranks)]
    return [(at, at + size, padded[at : at + size]) for at in starts]
