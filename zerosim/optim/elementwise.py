"""Optimizers that update every weight separately: a rule on flat arrays, in the compute dtype.

A new one is a subclass with its constants, the names of its states and `rule`, and a row in
`config/presets/optimizers.py`. The rule uses + - * / and functions of `xp` (NumPy's names, which are also CuPy's).
Each operation is rounded by itself, so a slice of the arrays gets the whole's bits, as every ZeRO stage
promises. On a device a rule counts as one kernel that reads all arrays and writes weights and states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from zerosim.backends.kernels import Array, Rule, Storing
from zerosim.device.device import Buffer
from zerosim.device.work import VECTOR, KernelWork
from zerosim.dtypes import DType
from zerosim.optim.optimizer import Add, StateArray, States, Step
from zerosim.placement.partition import Slice
from zerosim.placement.spec import FlatSpec
from zerosim.tensor.flat import Flat


class Now(NamedTuple):
    """A step's numbers: the learning rate, the step's number from 1 on, and the decay of these weights."""

    lr: float
    step: int
    weight_decay: float


class Elementwise:
    """Base of the element-wise rules: states as long as the weights, any slice separately. `flops` are per element."""

    cut: ClassVar[str] = "elements"
    weight_decay: float = 0.0
    flops: ClassVar[int]

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states, as in PyTorch's optimizers: one number each per weight, in the compute dtype."""
        return ()

    @property
    def foreach_temporaries(self) -> int:
        """Arrays beside the states that PyTorch's foreach implementation holds for all weights at once; 0 without
        one."""
        return 0

    @property
    def loop_temporaries(self) -> int:
        """The same of its loop over tensors, for the tensor in turn."""
        return self.foreach_temporaries

    def rule(self, xp: Any, w: Array, g: Array, now: Now, *states: Array) -> None:
        """Move `w` and `states` by one step, in place; `g` is the gradient, which the rule may overwrite.

        Shapes: all (n,), any n >= 1; the states in the order of their names, zeroed before step 1.
        """
        raise NotImplementedError

    def update(
        self, weights: Buffer, grad: Buffer, states: States, now: Step, *, decays: bool, storing: Storing | None = None
    ) -> None:
        """Move `weights`, and `states` by their names, by one step, in place; `decays`: weight decay applies to these
        weights.

        `storing`: all arrays are stored in bf16, and this is the rounding of weights.

        Shapes: all (n,), any n >= 1.
        """
        kept = [states[name] for name in self.states]
        moved = weights.nbytes + sum(state.nbytes for state in kept)
        moved += 0 if storing is None or storing.compensation is None else weights.nbytes
        name = type(self).__name__.lower()
        work = KernelWork(name, VECTOR, self.flops * weights.numel, moved + grad.nbytes, moved)
        said = Now(now.lr, now.number, self.weight_decay if decays else 0.0)
        rule = Rule(self.rule, said, now.grad_scale)
        device, arrays = weights.device, [buffer.array for buffer in (grad, weights, *kept)]
        device.kernels([work], device.backend.elementwise, rule, *arrays, storing=storing)

    def arrays(self, spec: FlatSpec, own: Slice, dtype: DType) -> Sequence[StateArray]:
        return [StateArray(name, own.size, dtype, spec.padding(own)) for name in self.states]

    def step(self, flat: Flat, now: Step, add: Add) -> None:
        weights, grad = flat.weights(), flat.grad_shard
        assert grad is not None, f"{flat.name} has no gradient"
        for start, stop, decays, storing in calls(flat, now):
            states = {name: flat.states[name][start:stop] for name in self.states}
            self.update(weights[start:stop], grad[start:stop], states, now, decays=decays, storing=storing)


def calls(flat: Flat, now: Step) -> list[tuple[int, int, bool, Storing | None]]:
    """Yield the ranges [start, stop) of a flat's local slice for single calls, cut where weight decay begins or ends;
    each weight separately if its rounding depends on its name."""
    found: list[tuple[int, int, bool, Storing | None]] = []
    for mine in flat.spec.within(flat.own):
        stop, decays = mine.at + mine.numel, now.decays(mine.weight)
        storing = None if now.storing is None else now.storing(flat, mine)
        if storing is None and found and found[-1][1:3] == (mine.at, decays):
            found[-1] = (found[-1][0], stop, decays, None)
        else:
            found.append((mine.at, stop, decays, storing))
    return found
