"""Pure bf16: no fp32 master. Weights, gradients and states are stored in bf16; a step is worked out in fp32.

    bytes per parameter with Adam, 2 + 2 of weight and gradient included
    nearest      2 + 2 + 4 = 8     an update of less than half a unit in the last place is lost
    stochastic   2 + 2 + 4 = 8     up as often as the value is near to the upper neighbour: right on average
    kahan        2 + 2 + 6 = 10    what rounding took from the weight is kept, and added the next time

bf16 has 8 bits: a weight w does not feel an update of less than |w|/512. States are rounded to the nearest; a step
takes them as they were before (torchao). Stochastic rounding draws 16 bits for each weight, a function of the seed, the
step, the weight's name and the element's place in it (in the piece of it that a tensor-parallel rank has): replicas and
stages draw alike. Kahan's sum is optimi's: c += the update; w' = bf16(w + c); c' = bf16(c + (w - w')). The update is
what a step makes of w in fp32, less w.

Sources: Zamirai et al., 2010.06192; torchao, `optim/quant_utils.py`; optimi, `utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerosim.backends.kernels import Array, Storing
from zerosim.dtypes import bf16, fp64
from zerosim.optim.optimizer import StateArray
from zerosim.placement.partition import Slice
from zerosim.placement.spec import Overlap
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import key

COMPENSATION = "compensation"


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a step's weights are stored: `kind` is nearest, stochastic or kahan."""

    kind: str
    seed: int

    def arrays(self, own: Slice) -> Sequence[StateArray]:
        """What it keeps beside the optimizer's states."""
        return [StateArray(COMPENSATION, own.size, bf16, own.padding)] if self.kind == "kahan" else []

    def storing(self, flat: Flat, mine: Overlap, lost: Array) -> Storing:
        """How a part of one weight is stored; updates that are lost are counted in `lost`, a number for each weight."""
        kept = flat.states.get(COMPENSATION)
        return Storing(
            self.kind,
            key("rounding", self.seed, flat.device.where.step, mine.weight.name),
            mine.start,
            None if kept is None else kept[mine.at : mine.at + mine.numel].array,
            lost[mine.which : mine.which + 1],
        )


class Lost:
    """How many updates left each of a rank's weights as it was, by step and flat buffer.

    A count is of the simulator's, as scratch is: it is read later, when the device is waited for anyway.
    """

    def __init__(self) -> None:
        self._read: dict[tuple[int, str], Any] = {}
        self._coming: list[tuple[int, str, Callable[[], Any]]] = []

    def counter(self, flat: Flat) -> Array:
        """A number for each weight, 0."""
        zeros = flat.device.backend.empty((len(flat.spec.weights),), fp64)
        flat.device.backend.fill(zeros, 0.0)
        return zeros

    def note(self, flat: Flat, counter: Array) -> None:
        """Of the step that is under way."""
        step = flat.device.where.step
        self._fetch(step)
        self._coming.append((step, flat.name, flat.device.backend.to_host_later(counter)))

    def counts(self) -> Mapping[tuple[int, str], Any]:
        """By step and flat, of each of its weights; nothing of a step that was skipped."""
        self._fetch(None)
        return self._read

    def _fetch(self, now: int | None) -> None:
        """What was asked for before step `now`."""
        while self._coming and self._coming[0][0] != now:
            step, name, values = self._coming.pop(0)
            self._read[step, name] = values()
