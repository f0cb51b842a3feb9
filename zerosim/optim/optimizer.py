"""What every optimizer is: a pure update on flat arrays, and the states that it keeps per element, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from zerosim.device.device import Buffer


class Optimizer(Protocol):
    """One state array per name and weight, in the compute dtype; K = 4 bytes each, plus the master's 4."""

    @property
    def states(self) -> tuple[str, ...]:
        """Their names, as PyTorch's optimizers call them."""
        ...

    @property
    def foreach_temporaries(self) -> int:
        """Arrays beside them that PyTorch's foreach implementation holds for all weights at once."""
        ...

    def update(
        self,
        weights: Buffer,
        grad: Buffer,
        states: Mapping[str, Buffer],
        *,
        grad_scale: float,
        lr: float,
        step: int,
        decays: bool,
    ) -> None:
        """Move `weights` by one step, in place. `grad * grad_scale` is the gradient; `step` counts from 1.

        Shapes: all (n,), any n >= 1. Elementwise: a slice's result is the whole's slice.
        """
        ...
