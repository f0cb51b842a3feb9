"""A rank's parameters at one moment: what it holds of each, and the values."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zerosim.errors import InputError
from zerosim.stepper.session import Parts
from zerosim.tensor.flat import Flat


@dataclass(frozen=True, slots=True)
class ParameterView:
    """One parameter as one rank holds it.

    state   'whole': kept for good; 'gathered': all of it, for the time of use; 'sharded': a part, which
            is elements [start, stop) of it; 'elsewhere': nothing, its values lie with other ranks; 'freed':
            nothing any more, for it was gathered here before; 'unplaced': there is no memory for it yet
    """

    name: str
    unit: str
    rank: int
    shape: tuple[int, ...]
    dtype: str
    state: str
    start: int
    stop: int
    _flat: Flat
    _index: int

    def values(self) -> Any:
        """A copy, as a NumPy array: in its shape where all of it is there, flat where a part is.

        Raises: InputError where nothing is.
        """
        flat = self._flat
        to_host = flat.device.backend.to_host
        if self.state in ("whole", "gathered") and flat.param is not None:
            return to_host(flat.window(flat.param, self._index).array)
        source = flat.param_shard if flat.param_shard is not None else flat.master
        if self.state != "sharded" or source is None:
            raise InputError(f"rank {self.rank} holds nothing of {self.name} now ({self.state})")
        mine = flat.spec.overlap(flat.own, self._index)
        assert mine is not None  # it is sharded
        return to_host(source[mine.at : mine.at + mine.numel].array)

    def __repr__(self) -> str:
        part = f" [{self.start}:{self.stop}]" if self.state == "sharded" else ""
        return f"{self.name} {self.shape} {self.dtype} on rank {self.rank}: {self.state}{part}"


class Parameters(Mapping[str, ParameterView]):
    """Views of all parameters of a rank's model, by name."""

    def __init__(self, rank: int, parts: Parts) -> None:
        self._rank = rank
        self._keeps = parts.strategy.keeps_params
        self._places = {
            weight.name: (flat, index) for flat in parts.model.flats for index, weight in enumerate(flat.spec.weights)
        }

    def __getitem__(self, name: str) -> ParameterView:
        if name not in self._places:
            near = difflib.get_close_matches(name, self._places, 3)
            raise InputError(
                f"no parameter {name!r}: " + (f"did you mean {' or '.join(near)}?" if near else "see list(parameters)")
            )
        flat, index = self._places[name]
        weight, mine = flat.spec.weights[index], flat.spec.overlap(flat.own, index)
        part = (0, 0) if mine is None else (mine.start, mine.stop)
        placed = any(held is not None for held in (flat.param, flat.param_shard, flat.master))
        if flat.param is not None:
            state, part = "whole" if self._keeps else "gathered", (0, weight.numel)
        elif not placed:
            state = "unplaced"
        else:
            nothing = "freed" if flat.was_unsharded else "elsewhere"
            state = "sharded" if part[0] < part[1] else nothing
        return ParameterView(name, flat.name, self._rank, weight.shape, flat.dtype.name, state, *part, flat, index)

    def __repr__(self) -> str:
        return "\n".join(repr(view) for view in self.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
