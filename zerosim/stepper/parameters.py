"""A rank's parameters at one moment: which part of each it holds, and the values.

Looking changes nothing: a view holds no memory of the rank, however long you keep it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from zerosim.device.device import Buffer
from zerosim.errors import InputError, did_you_mean
from zerosim.stepper.session import Parts
from zerosim.tensor.flat import Flat


def _nothing() -> None:
    """The view of a rank that holds nothing, or no longer."""


@dataclass(frozen=True, slots=True)
class ParameterView:
    """One parameter as one rank holds it.

    state   'whole': all of it, for good; 'gathered': all of it, for the time of use; 'sharded': a part,
            elements [start, stop) of it; 'elsewhere': nothing, other ranks hold its values; 'freed': nothing
            any more, because it was gathered here before, or its rank's program has ended; 'unplaced': no
            memory yet

    State and bounds are those of the moment of looking.
    """

    name: str
    unit: str
    rank: int
    shape: tuple[int, ...]
    dtype: str
    state: str
    start: int
    stop: int
    _at: int = field(compare=False)
    """Where its values begin in the buffer."""
    _buffer: Callable[[], Buffer | None] = field(default=_nothing, compare=False)
    """A weak reference: only the rank decides when its buffer is freed."""

    def values(self) -> Any:
        """Copy the current values as a NumPy array: in its shape if all of the parameter is there, flat if a part is.

        Raises: InputError if the rank held nothing, or has freed it since.
        """
        if self.state not in ("whole", "gathered", "sharded"):
            raise InputError(f"rank {self.rank} holds nothing of {self.name} now ({self.state})")
        buffer = self._buffer()
        if buffer is None:
            raise InputError(
                f"rank {self.rank} has freed {self.name} since you looked ({self.state} then): "
                f"look again with world.ranks[{self.rank}].parameters"
            )
        part = buffer[self._at : self._at + self.stop - self.start]
        values = buffer.device.backend.to_host(part.array)
        return values if self.state == "sharded" else values.reshape(self.shape)

    def __repr__(self) -> str:
        part = f" [{self.start}:{self.stop}]" if self.state == "sharded" else ""
        return f"{self.name} {self.shape} {self.dtype} on rank {self.rank}: {self.state}{part}"


class Parameters(Mapping[str, ParameterView]):
    """Views of all parameters of a rank's model, by name."""

    def __init__(self, rank: int, parts: Parts) -> None:
        self._rank = rank
        self._places = {
            weight.own_name: (weakref.ref(flat), flat.spec, index, flat.dtype.name)
            for flat in parts.model.flats
            for index, weight in enumerate(flat.spec.weights)
        }

    def __getitem__(self, name: str) -> ParameterView:
        if name not in self._places:
            near = did_you_mean(name, self._places, "see list(parameters)", most=3, quote=str)
            raise InputError(f"no parameter {name!r}: {near}")
        flat, spec, index, dtype = self._places[name]
        state, start, stop, at, held = self._held(flat(), index)
        buffer = _nothing if held is None else weakref.ref(held)
        shape = spec.weights[index].shape
        return ParameterView(name, spec.name, self._rank, shape, dtype, state, start, stop, at, buffer)

    def _held(self, flat: Flat | None, index: int) -> tuple[str, int, int, int, Buffer | None]:
        """Return a parameter's state, its elements on this rank, where they begin in a buffer, and the buffer."""
        if flat is None:
            return "freed", 0, 0, 0, None
        if flat.param is not None:
            state = "whole" if flat.held.rows["param"].is_whole else "gathered"
            return state, 0, flat.spec.weights[index].numel, flat.spec.offsets[index], flat.param
        source = flat.param_shard if flat.param_shard is not None else flat.master
        mine = flat.spec.overlap(flat.own, index)
        if source is None:
            return "unplaced", 0, 0, 0, None
        if mine is None or mine.start == mine.stop:
            return "freed" if flat.was_unsharded else "elsewhere", 0, 0, 0, None
        return "sharded", mine.start, mine.stop, mine.at, source

    def __repr__(self) -> str:
        return "\n".join(repr(view) for view in self.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
