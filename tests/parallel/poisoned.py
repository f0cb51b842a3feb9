"""Strategies of which one rank makes one bad number."""

from __future__ import annotations

import numpy as np

from zerosim.nn import Unit
from zerosim.parallel.base import Strategy


def poisoned(
    kind: type[Strategy], rank: int, unit: str, value: float = np.nan, *, slot: int = 0, weight: str = ""
) -> type[Strategy]:
    """`kind`, but at step 1 one element of `rank`'s gradient of `unit` is `value`: the 7th, of all or of a weight."""

    class Poisoned(kind):  # type: ignore[misc, valid-type]
        def post_backward(self, of: Unit) -> None:
            where = self.device.where
            if (self.device.rank, of.name, where.step, where.slot) == (rank, unit, 1, slot):
                assert of.flat.collector.grad is not None
                starts = zip(of.flat.spec.weights, of.flat.spec.offsets, strict=True)
                at = next(offset for each, offset in starts if weight in ("", each.name))
                of.flat.collector.grad.array[at + 7] = value
            super().post_backward(of)

    return Poisoned
