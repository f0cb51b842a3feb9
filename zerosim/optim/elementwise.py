"""Optimizers that treat every weight by itself: a rule on flat arrays, in the compute dtype.

A new one is a subclass with its constants, the names of its states and `rule`, and a row in
`config/presets/optimizers.py`. The rule is written with + - * / and what `xp` has (NumPy's names, which are CuPy's):
each of those is rounded by itself, so that a slice of the arrays gives the whole's bits, which is what every ZeRO stage
promises. On a device a rule counts as one kernel that reads all arrays and writes weights and states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer
from zerosim.device.work import VECTOR, KernelWork


class Now(NamedTuple):
    """What a step says: the learning rate, its number from 1 on, and the decay of these weights."""

    lr: float
    step: int
    weight_decay: float


class Elementwise:
    """Base of the element-wise rules. `flops` are those of an element."""

    weight_decay: float
    flops: ClassVar[int]

    @property
    def states(self) -> tuple[str, ...]:
        """Their names, as PyTorch's optimizers call them."""
        return ()

    @property
    def foreach_temporaries(self) -> int:
        """Arrays beside them that PyTorch's foreach implementation holds for all weights at once; 0 without one."""
        return 0

    def rule(self, xp: Any, w: Array, g: Array, now: Now, *states: Array) -> None:
        """Move `w` and `states` by one step, in place; `g` is the gradient, of which nothing is needed afterwards.

        Shapes: all (n,), any n >= 1; the states in the order of their names, zeroed before step 1.
        """
        raise NotImplementedError

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
        kept = [states[name].array for name in self.states]
        moved = weights.nbytes + sum(states[name].nbytes for name in self.states)
        name = type(self).__name__.lower()
        work = KernelWork(name, VECTOR, self.flops * weights.numel, moved + grad.nbytes, moved)
        now = Now(lr, step, self.weight_decay if decays else 0.0)
        device = weights.device
        device.kernels([work], device.backend.elementwise, self.rule, now, grad_scale, grad.array, weights.array, *kept)
