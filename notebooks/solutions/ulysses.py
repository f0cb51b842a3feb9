"""Exercise 38: every part is cut along one axis, and the pieces are joined along the other."""

from __future__ import annotations

import numpy as np

from zerosim.grading import Array


def my_exchange(parts: list[Array], back: bool) -> list[Array]:
    cut, join = (0, 1) if back else (1, 0)
    pieces = [np.split(part, len(parts), axis=cut) for part in parts]
    return [np.concatenate([of[rank] for of in pieces], axis=join) for rank in range(len(parts))]
