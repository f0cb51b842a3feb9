"""What every optimizer is: how it may be cut, the states that it keeps of a part of a flat buffer, and a step of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from zerosim.backends.kernels import Storing
from zerosim.device.device import Buffer
from zerosim.dtypes import DType
from zerosim.placement.partition import Slice
from zerosim.placement.spec import FlatSpec, Overlap, WeightSpec
from zerosim.tensor.flat import Flat


class StateArray(NamedTuple):
    """One array of states, zeroed before step 1: its name (PyTorch's), elements, and how many of them are padding."""

    name: str
    numel: int
    dtype: DType
    padding: int = 0


class Step(NamedTuple):
    """What a step says. `grad * grad_scale` is the gradient; `number` counts from 1; `decay` is 'all' or 'matrices'.

    `storing`, without fp32 masters: how a part of one weight is stored.
    """

    grad_scale: float
    lr: float
    number: int
    decay: str = "all"
    storing: Callable[[Flat, Overlap], Storing] | None = None

    def decays(self, weight: WeightSpec) -> bool:
        """Whether weight decay is for this weight."""
        return self.decay == "all" or len(weight.shape) >= 2


States = Mapping[str, Buffer]
"""A part's states, by their names."""
Add = Callable[[Buffer], None]
"""Adds a buffer up, in place, over the ranks that hold the other parts of the same flat buffer; each gets the sums."""


def alone(sums: Buffer) -> None:
    """`Add` where a rank holds flat buffers whole: nothing is missing."""


class Optimizer(Protocol):
    """A pure update of the own part of a flat buffer.

    `cut` says which parts it can work on, each by itself:

    elements   any. A part's result is the whole's part, to the bit
    blocks     any whose edges lie at blocks of one tensor (8-bit states), to the bit
    sums       any, if sums over a tensor's rows, columns and elements are exchanged
    matrices   whole tensors only: they belong to owners
    """

    @property
    def cut(self) -> str: ...

    @property
    def foreach_temporaries(self) -> int:
        """Arrays beside the states that PyTorch's foreach implementation holds for all weights at once."""
        ...

    def arrays(self, spec: FlatSpec, own: Slice, dtype: DType) -> Sequence[StateArray]:
        """The states of the part `own`, whose master and update are in the compute dtype `dtype`; each has its name."""
        ...

    def step(self, flat: Flat, now: Step, add: Add) -> None:
        """Move `flat.weights()`, the own part, by `flat.grad_shard` and `flat.states`, in place.

        `add` is for `sums` alone, and called as often on every rank that holds a part.
        """
        ...


@runtime_checkable
class EstimatesCurvature(Protocol):
    """An optimizer that also wants a gradient on labels that the model itself draws, now and then.

    After steps k - 1, 2k - 1, ... (counted from 0, skipped ones too), k = `estimates_every` and 0 for never, forward
    and backward run once more on that step's inputs, with labels y ~ softmax(logits), and `estimate` takes the place of
    `step`.
    """

    @property
    def estimates_every(self) -> int: ...

    def estimate(self, flat: Flat, grad_scale: float) -> None:
        """Update `flat.states` by `flat.grad_shard * grad_scale`, in place: the own part of the gradient of the mean
        loss over the drawn labels of the whole batch."""
        ...


def estimates_every(optimizer: Optimizer) -> int:
    """0 for one that estimates nothing."""
    return optimizer.estimates_every if isinstance(optimizer, EstimatesCurvature) else 0
