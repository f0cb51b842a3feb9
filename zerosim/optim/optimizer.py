"""The optimizer protocol: the allowed cuts, the states for a slice of a flat buffer, and a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from zerosim.backends.kernels import Storing
from zerosim.device.device import Buffer
from zerosim.dtypes import DType
from zerosim.optim.states import StateArray as StateArray
from zerosim.placement.partition import Slice
from zerosim.placement.spec import FlatSpec, Overlap, WeightSpec
from zerosim.tensor.flat import Flat


class Step(NamedTuple):
    """A step's numbers. `grad * grad_scale` is the gradient; `number` counts from 1; `decay` is 'all' or 'matrices'.

    `storing`, without fp32 masters: the rounding of a slice of one weight.
    """

    grad_scale: float
    lr: float
    number: int
    decay: str = "all"
    storing: Callable[[Flat, Overlap], Storing] | None = None

    def decays(self, weight: WeightSpec) -> bool:
        """Return whether weight decay applies to this weight."""
        return self.decay == "all" or len(weight.shape) >= 2


States = Mapping[str, Buffer]
"""A slice's states, by name."""
Add = Callable[[Buffer], None]
"""Adds a buffer up, in place, over the ranks with the other slices of the same flat buffer; each gets the sums."""


def alone(sums: Buffer) -> None:
    """Do nothing: `Add` for a rank with whole flat buffers."""


class Optimizer(Protocol):
    """A pure update of the local slice of a flat buffer.

    `cut` says which slices it can update separately:

    elements   any slice, with the whole's bits
    blocks     any slice whose edges are at quantisation blocks of one tensor (8-bit states), with the whole's bits
    sums       any slice, if sums over a tensor's rows, columns and elements are exchanged
    matrices   whole tensors only, which belong to owners
    """

    @property
    def cut(self) -> str: ...

    @property
    def foreach_temporaries(self) -> int:
        """Arrays beside the states that PyTorch's foreach implementation holds for all weights at once."""
        ...

    def arrays(self, spec: FlatSpec, own: Slice, dtype: DType) -> Sequence[StateArray]:
        """Return the states of the slice `own` by name; master and update are in the compute dtype `dtype`."""
        ...

    def step(self, flat: Flat, now: Step, add: Add) -> None:
        """Move `flat.weights()`, the local slice, by `flat.grad_shard` and `flat.states`, in place.

        Only `sums` uses `add`, equally often on every rank with a slice.
        """
        ...


@runtime_checkable
class EstimatesCurvature(Protocol):
    """An optimizer that sometimes needs a gradient on labels drawn from the model itself.

    After steps k - 1, 2k - 1, ... (counted from 0, skipped ones too), k = `estimates_every` and 0 for never, forward
    and backward run once more on that step's inputs, with labels y ~ softmax(logits), and `estimate` replaces
    `step`.
    """

    @property
    def estimates_every(self) -> int: ...

    def estimate(self, flat: Flat, grad_scale: float) -> None:
        """Update `flat.states` by `flat.grad_shard * grad_scale`, in place: the local slice of the gradient of the mean
        loss over the whole batch's drawn labels."""
        ...


def estimates_every(optimizer: Optimizer) -> int:
    """Return the number of steps between estimates; 0: never."""
    return optimizer.estimates_every if isinstance(optimizer, EstimatesCurvature) else 0
