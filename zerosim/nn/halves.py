"""A unit with trained and frozen parameters: one flat buffer of each kind, gathered in turn.

A flat buffer's rows describe the states of the whole buffer. So frozen and trained parameters are in separate
buffers, parameters stored as codes in a third one, and those of experts that are cut over other axes in more. The
first declared buffer has the unit's name, and the others add their kind. Tensors of adapters may each have a buffer, of
their own name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zerosim.config.parts.tuning import TuningConfig, is_adapter
from zerosim.nn.unit import Unit
from zerosim.placement.block import Role
from zerosim.placement.mesh import STATES
from zerosim.tensor.flat import Flat
from zerosim.tensor.tensor import Parameter

MakeFlat = Callable[[str, str, str, tuple[str, ...]], Flat]
"""Makes a flat buffer: its name, the unit or leaf module that is gathered with it, the kind of its parameters, and the
axes that cut their states."""
TRAINED, FROZEN, FROZEN_FP32, EXPERTS, CODED = "trained", "frozen", "frozen_fp32", "experts", "coded"


class Halves:
    """Takes a flat buffer's place where layers declare parameters; `tuning` decides the kind of each."""

    leaves: Sequence[Unit] = ()

    def __init__(self, name: str, make: MakeFlat, tuning: TuningConfig, *, coded: bool = False) -> None:
        self.coded = coded  # trained maps are stored as codes of 8 bits
        self.name = name
        self.make = make
        self.tuning = tuning
        self._halves: dict[str, Flat] = {}

    @property
    def flats(self) -> Sequence[Flat]:
        """The buffers with parameters, in order of declaration."""
        return tuple(self._halves.values())

    def declare(self, name: str, shape: tuple[int, ...], *, axes: tuple[str, ...] = STATES, **how: Any) -> Parameter:
        """Declare a parameter as `Flat.declare`, in the buffer of its kind, whose states are cut over `axes`."""
        kind = kind_of(self.tuning, name, shape, how.get("role"))
        if self.coded and kind == TRAINED and is_matrix_of_map(name, shape, how.get("role")):
            kind = CODED
        apart = self.tuning.adapter_shards in ("tensor", "rows") and kind == TRAINED and is_adapter(name)
        experts = [EXPERTS] if axes != STATES else []
        key = name if apart else ".".join([*experts, kind])
        if key not in self._halves:
            kinds = [*experts, *([kind] if kind != TRAINED or not experts else [])]
            own = name if apart else ".".join([self.name, *kinds]) if self._halves or experts else self.name
            self._halves[key] = self.make(own, self.name, kind, axes)
        return self._halves[key].declare(name, shape, **how)


def kind_of(tuning: TuningConfig, name: str, shape: tuple[int, ...], role: Role | None) -> str:
    """Return the kind of a parameter: trained, frozen, frozen in fp32 (vectors, with `prepare_kbit`) or, of a frozen
    linear map of a block, the format `base`."""
    if tuning.trains(name):
        return TRAINED
    if tuning.prepare_kbit and len(shape) == 1:
        return FROZEN_FP32
    return (tuning.base if is_matrix_of_map(name, shape, role) else None) or FROZEN


def is_matrix_of_map(name: str, shape: tuple[int, ...], role: Role | None) -> bool:
    """Return whether a parameter is the matrix of a linear map of a block."""
    is_map = role is not None and role.is_map and len(shape) == 2 and not is_adapter(name)
    return is_map and not name.endswith("_bias")  # of each expert


def buffers_of(
    unit: str, make: MakeFlat, tuning: TuningConfig, *, apart: bool = False, coded: bool = False
) -> Flat | Halves:
    """Return where the layers of a unit declare parameters: one buffer, or one of each kind. `apart`: experts' states
    are cut over other axes; `coded`: trained maps are stored as codes of 8 bits."""
    if tuning.is_on or apart or coded:
        return Halves(unit, make, tuning, coded=coded)
    return make(unit, unit, TRAINED, STATES)
