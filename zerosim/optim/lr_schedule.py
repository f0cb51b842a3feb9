"""The learning rate as a function of the updates so far. Skipped steps do not count."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zerosim.errors import InputError


@dataclass(frozen=True, slots=True)
class LRSchedule:
    """Linear warm-up over `warmup` updates, then constant, or a cosine from `lr` to `min_lr` at `total`.

    Warm-up reaches lr at its last update: lr * (t + 1) / warmup for t = 0 .. warmup - 1.

    Raises: InputError for an unknown shape.
    """

    lr: float
    shape: str = "constant"
    warmup: int = 0
    min_lr: float = 0.0
    total: int = 1

    def __post_init__(self) -> None:
        if self.shape not in ("constant", "cosine"):
            raise InputError(f"schedule {self.shape!r}: expected constant or cosine")

    def __call__(self, done: int) -> float:
        """Return the rate for the update after `done` earlier ones."""
        if done < self.warmup:
            return self.lr * (done + 1) / self.warmup
        if self.shape == "constant":
            return self.lr
        progress = min(1.0, (done - self.warmup) / max(1, self.total - self.warmup))
        return self.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (self.lr - self.min_lr)
