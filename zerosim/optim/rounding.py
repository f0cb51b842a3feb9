"""Pure bf16: no fp32 master. Weights, gradients and states are stored in bf16; a step is computed in fp32.

    bytes per parameter with Adam, 2 + 2 of weight and gradient included
    nearest      2 + 2 + 4 = 8     an update of less than half a unit in the last place is lost
    stochastic   2 + 2 + 4 = 8     rounds up with a probability proportional to the distance: right on average
    kahan        2 + 2 + 6 = 10    the rounding error is stored, and added in the next step

bf16 has 8 bits, so a weight w loses an update of less than |w|/512. States are rounded to the nearest; a step
uses their values before rounding (torchao). Stochastic rounding draws 16 bits for each weight, a function of the seed,
the step, the weight's name and the element's position in it (in a tensor-parallel rank's piece of it). So replicas and
ZeRO stages draw the same bits. Kahan's sum is optimi's: c += the update; w' = bf16(w + c); c' = bf16(c + (w - w')). The
update is the fp32 result of a step minus w.

Sources: Zamirai et al., 2010.06192; torchao, `optim/quant_utils.py`; optimi, `utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerosim.backends.kernels import Array, Storing
from zerosim.dtypes import bf16, fp64
from zerosim.optim.optimizer import StateArray
from zerosim.placement.spec import Overlap
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import key

COMPENSATION = "compensation"


@dataclass(frozen=True, slots=True)
class Rounding:
    """The rounding of a step's weights: `kind` is nearest, stochastic or kahan."""

    kind: str
    seed: int

    def arrays(self, size: int, padding: int) -> Sequence[StateArray]:
        """Return its arrays beside the optimizer's states."""
        return [StateArray(COMPENSATION, size, bf16, padding)] if self.kind == "kahan" else []

    def storing(self, flat: Flat, mine: Overlap, lost: Array) -> Storing:
        """Return the rounding of a slice of one weight; `lost`, two numbers for each weight, counts lost updates."""
        kept = flat.states.get(COMPENSATION)
        return Storing(
            self.kind,
            key("rounding", self.seed, flat.device.where.step, mine.weight.name),
            mine.start,
            None if kept is None else kept[mine.at : mine.at + mine.numel].array,
            lost[2 * mine.which : 2 * mine.which + 2],
        )


class Lost:
    """Counts of updates that left a rank's weights, or their last state, unchanged, by step and flat buffer.

    The counters belong to the simulator, like scratch. They are read later, when the program waits for the device in
    any case.
    """

    def __init__(self) -> None:
        self._read: dict[tuple[int, str], Any] = {}
        self._coming: list[tuple[int, str, Callable[[], Any]]] = []

    def counter(self, flat: Flat) -> Array:
        """Return two zeroed counters for each weight."""
        zeros = flat.device.backend.empty((2 * len(flat.spec.weights),), fp64)
        flat.device.backend.fill(zeros, 0.0)
        return zeros

    def note(self, flat: Flat, counter: Array) -> None:
        """Note the counts of the current step."""
        step = flat.device.where.step
        self._fetch(step)
        self._coming.append((step, flat.name, flat.device.backend.to_host_later(counter)))

    def counts(self) -> Mapping[tuple[int, str], Any]:
        """Return the counts by step and flat, two for each weight; nothing for a skipped step."""
        self._fetch(None)
        return self._read

    def _fetch(self, now: int | None) -> None:
        """Fetch the counts of steps before `now`."""
        while self._coming and self._coming[0][0] != now:
            step, name, values = self._coming.pop(0)
            self._read[step, name] = values()
