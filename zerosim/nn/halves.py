"""A unit with trained and frozen parameters: one flat buffer of each kind, gathered in turn.

A flat buffer's rows describe the states of the whole buffer. So frozen and trained parameters are in separate
buffers, and parameters stored as codes in a third one. The first declared buffer has the unit's name, and the others
add their kind. Tensors of adapters may each have a buffer, of their own name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zerosim.config.parts.tuning import TuningConfig, is_adapter
from zerosim.nn.unit import Unit
from zerosim.placement.block import Role
from zerosim.tensor.flat import Flat
from zerosim.tensor.tensor import Parameter

MakeFlat = Callable[[str, str, str], Flat]
"""Makes a flat buffer: its name, the unit or leaf module that is gathered with it, and the kind of its parameters."""
TRAINED, FROZEN, FROZEN_FP32 = "trained", "frozen", "frozen_fp32"


class Halves:
    """Takes a flat buffer's place where layers declare parameters; `tuning` decides the kind of each."""

    leaves: Sequence[Unit] = ()

    def __init__(self, name: str, make: MakeFlat, tuning: TuningConfig) -> None:
        self.name = name
        self.make = make
        self.tuning = tuning
        self._halves: dict[str, Flat] = {}

    @property
    def flats(self) -> Sequence[Flat]:
        """The buffers with parameters, in order of declaration."""
        return tuple(self._halves.values())

    def declare(self, name: str, shape: tuple[int, ...], **how: Any) -> Parameter:
        """Declare a parameter as `Flat.declare`, in the buffer of its kind."""
        kind = kind_of(self.tuning, name, shape, how.get("role"))
        apart = self.tuning.adapter_shards in ("tensor", "rows") and kind == TRAINED and is_adapter(name)
        key = name if apart else kind
        if key not in self._halves:
            own = name if apart else f"{self.name}.{kind}" if self._halves else self.name
            self._halves[key] = self.make(own, self.name, kind)
        return self._halves[key].declare(name, shape, **how)


def kind_of(tuning: TuningConfig, name: str, shape: tuple[int, ...], role: Role | None) -> str:
    """Return the kind of a parameter: trained, frozen, frozen in fp32 (vectors, with `prepare_kbit`) or, of a frozen
    linear map of a block, the format `base`."""
    if tuning.trains(name):
        return TRAINED
    if tuning.prepare_kbit and len(shape) == 1:
        return FROZEN_FP32
    is_map = role is not None and role.is_map and len(shape) == 2 and not is_adapter(name)
    is_map = is_map and not name.endswith("_bias")  # of each expert
    return (tuning.base if is_map else None) or FROZEN


def buffers_of(unit: str, make: MakeFlat, tuning: TuningConfig) -> Flat | Halves:
    """Return where the layers of a unit declare parameters: one buffer, or one of each kind."""
    return Halves(unit, make, tuning) if tuning.is_on else make(unit, unit, TRAINED)
