"""Estimates of curvature, for optimizers that want them: after some steps, on labels that the model draws."""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.optim.updater import Updater
from zerosim.tensor.flat import Flat


def estimate(updater: Updater, flats: Sequence[Flat], scale: float | None) -> None:
    """In place of a step where gradients are those on drawn labels: update what the optimizer estimates of the own
    parts. No weight moves, so nothing is published; None: nothing is updated either."""
    for flat in flats:
        if scale is not None and flat.is_trained:
            updater.make_states([flat])
            with flat.device.scope(unit=flat.module):
                updater.estimate(flat, scale)
        flat.drop_grads()
