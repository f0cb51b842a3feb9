"""Estimates of curvature, for optimizers that need them: after some steps, on labels drawn from the model."""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.optim.updater import Updater
from zerosim.tensor.flat import Flat, in_turn


def estimate(updater: Updater, flats: Sequence[Flat], scale: float | None) -> None:
    """Update the optimizer's estimates of the local shards, in place of a step whose gradients are those on drawn
    labels. No weight changes, so nothing is published. With `scale` None nothing is updated."""
    for flat in in_turn(flats):
        if scale is not None and flat.spec.is_trained:
            updater.make_states([flat])
            with flat.device.scope(unit=flat.spec.module):
                updater.estimate(flat, scale)
        flat.drop_grads()
