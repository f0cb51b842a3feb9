"""A unit with trained and frozen parameters: one flat buffer of each kind, gathered in turn.

A flat buffer's rows describe the states of the whole buffer. So frozen and trained parameters are in separate
buffers, and parameters stored in NF4 in a third one. The first declared buffer has the unit's name, and the others add
their kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zerosim.config.parts.tuning import TuningConfig, is_adapter
from zerosim.nn.unit import Unit
from zerosim.placement.block import Role
from zerosim.tensor.flat import Flat
from zerosim.tensor.tensor import Parameter


class Halves:
    """Takes a flat buffer's place where layers declare parameters; `tuning` decides the kind of each."""

    leaves: Sequence[Unit] = ()

    def __init__(self, name: str, make: Callable[[str, str], Flat], tuning: TuningConfig) -> None:
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
        stored = stored_as(self.tuning, name, shape, how.get("role"))
        kind = stored or ("trained" if self.tuning.trains(name) else "frozen")
        if kind not in self._halves:
            own = f"{self.name}.{kind}" if self._halves else self.name
            self._halves[kind] = self.make(own, stored)
        return self._halves[kind].declare(name, shape, **how)


def stored_as(tuning: TuningConfig, name: str, shape: tuple[int, ...], role: Role | None) -> str:
    """Return the stored format of a parameter: `base` for frozen linear maps of blocks, '' (unchanged) for all
    others, adapters too."""
    is_map = role is not None and role.is_map and len(shape) == 2 and not tuning.trains(name) and not is_adapter(name)
    return tuning.base or "" if is_map else ""
