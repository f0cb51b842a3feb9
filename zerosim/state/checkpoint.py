"""A saved step, opened: any state of any weight, whole or the piece that a rank of another mesh needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zerosim.config.safetensors import Stored, read_header
from zerosim.errors import InputError
from zerosim.placement.split import Cut, put, take
from zerosim.state.manifest import read_index, read_manifest
from zerosim.state.runs import Cuts, Run, from_json


class Checkpoint:
    """The runs of one saved step by weight and state, without their numbers.

    Raises: InputError for files that are no checkpoint, or do not agree with one another.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, read_manifest(folder)
        self._runs: dict[tuple[str, str], list[tuple[Run, Stored]]] = {}
        self.by_rank: dict[int, list[tuple[Run, Stored]]] = {}
        for entry in self.manifest.files:
            if entry.name.endswith(".json"):
                self._open(folder / entry.name)

    def _open(self, index: Path) -> None:
        number = index.stem.removeprefix("rank-")
        if not (number.isascii() and number.isdecimal()):
            raise InputError(f"{index}: expected rank-, and a rank's number; its manifest is damaged")
        stored = read_header(str(index.with_suffix(".safetensors")))
        own = self.by_rank[int(number)] = []
        for values in read_index(index):
            try:
                run = from_json(values)
                tensor = stored[run.name]
                if tensor.numel != run.numel:
                    raise ValueError(f"{tensor.numel} numbers")
                same = self._runs.setdefault((run.weight, run.state), [])
                if same and (same[0][0].shape, same[0][0].follows) != (run.shape, run.follows):
                    raise ValueError(f"{run.weight} has two shapes")
            except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
                raise InputError(f"{index}: does not describe its tensors ({error}); it is damaged") from None
            own.append((run, tensor))
            same.append((run, tensor))

    @property
    def step(self) -> int:
        """The steps that were done."""
        return self.manifest.step

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shape of each weight."""
        return {run.weight: run.shape for runs in self._runs.values() for run, _ in runs if run.follows != "packed"}

    @property
    def names(self) -> Collection[tuple[str, str]]:
        """Each weight with each of its states."""
        return self._runs.keys()

    def follows(self, weight: str, state: str) -> str:
        """Return what a state has a number for (`Run.follows`)."""
        return self._runs[weight, state][0][0].follows

    def dtype(self, weight: str, state: str) -> str:
        """Return the dtype of a state in the files, bf16 as the fp32 that is read."""
        stored = self._runs[weight, state][0][1].dtype
        return "F32" if stored == "BF16" else stored

    def pieces(self, weight: str, state: str) -> list[tuple[Cuts, int]]:
        """Return the pieces of a weight's state: their cuts, and their numbers."""
        stops = dict[Cuts, int]()
        for run, _ in self._runs[weight, state]:
            stops[run.cuts] = max(stops.get(run.cuts, 0), run.stop)
        return sorted(stops.items(), key=lambda one: [piece for _, piece in one[0]])

    def alike(self, weight: str, state: str, cuts: Cuts, stop: int) -> Any:
        """Return the numbers of a piece; of ranks that have some of their own, those of the first."""
        found = [one for one in self._runs[weight, state] if one[0].cuts == cuts]
        return self._range([one for one in found if one[0].rank == found[0][0].rank], 0, stop)

    def ranks_of(self, run: Run) -> set[int]:
        """Return the ranks with numbers of their own for a run's piece."""
        found = self._runs.get((run.weight, run.state), [])
        return {
            one.rank for one, _ in found if (one.cuts, one.follows) == (run.cuts, run.follows) and one.rank is not None
        }

    def states(self, weight: str) -> list[str]:
        """Return which states of a weight there are."""
        return [state for name, state in self._runs if name == weight]

    def runs(self) -> Iterator[tuple[Run, Stored]]:
        """Yield all of them."""
        for runs in self._runs.values():
            yield from runs

    def piece(
        self, weight: str, state: str, shape: tuple[int, ...], cuts: Cuts, start: int, stop: int,
        rank: int | None = None,
    ) -> Any:  # fmt: skip
        """Return numbers [start, stop) of a piece of a weight's state, a flat host array; bf16 as the equal fp32.

        Where the run that wrote it cut the weight alike, only these numbers are read. Else the whole weight is
        assembled and cut. `rank`: of numbers that are each rank's own.

        Raises: InputError for another model, a hole, and a state that has no numbers for such a piece.
        """
        found = self._runs.get((weight, state), [])
        if not found:
            raise InputError(f"{self.folder}: has no {state} of {weight}{self._instead(weight)}")
        if (there := found[0][0].shape) != shape:
            raise InputError(f"{self.folder}: {weight} has shape {there} there, and {shape} in this run")
        alike = [one for one in found if one[0].cuts == cuts and one[0].rank == rank]
        if alike:
            return self._range(alike, start, stop)
        if found[0][0].follows != "elements":
            raise InputError(
                f"{self.folder}: numbers of {state} of {weight} belong to whole pieces of another mesh, and "
                f"cannot be cut for this one; resume with its {self._cut_by()}"
            )
        members = [Cut(split, piece, split.pieces) for split, piece in cuts]
        return take(self.whole(weight, state), members).reshape(-1)[start:stop]

    def means(self, weight: str, state: str, cuts: Cuts, start: int, stop: int) -> Any:
        """Return the mean over ranks of numbers that are each rank's own: what a mean of gradients makes of them."""
        found = [one for one in self._runs.get((weight, state), []) if one[0].cuts == cuts]
        ranks = sorted({run.rank for run, _ in found if run.rank is not None})
        if not ranks:
            raise InputError(f"{self.folder}: has no {state} of {weight} for this mesh; resume with its own")
        total = np.zeros(stop - start, np.float64)
        for rank in ranks:
            total += self._range([one for one in found if one[0].rank == rank], start, stop)
        return (total / len(ranks)).astype(np.float32)

    def whole(self, weight: str, state: str) -> Any:
        """Return a whole state that has a number for each element of a weight, in the weight's shape.

        Raises: InputError for a hole.
        """
        found = self._runs[weight, state]
        whole: Any = None
        covered = np.zeros(found[0][0].shape, bool)
        for cuts in dict.fromkeys(run.cuts for run, _ in found):
            alike = [one for one in found if one[0].cuts == cuts]
            local_shape = cuts[-1][0].local_shape if cuts else found[0][0].shape
            local = self._range(alike, 0, int(np.prod(local_shape, dtype=np.int64))).reshape(local_shape)
            if not cuts:
                return local
            whole = np.zeros(found[0][0].shape, local.dtype) if whole is None else whole
            members = [Cut(split, piece, split.pieces) for split, piece in cuts]
            put(local, whole, members)
            put(np.ones(local_shape, bool), covered, members)
        if not covered.all():
            at = tuple(int(place) for place in np.argwhere(~covered)[0])
            raise InputError(f"{self.folder}: no rank's file has element {at} of {state} of {weight}: it has a hole")
        return whole

    def _range(self, runs: list[tuple[Run, Stored]], start: int, stop: int) -> Any:
        """Join the numbers [start, stop) of one piece."""
        parts, at = list[Any](), start
        for run, stored in sorted(runs, key=lambda one: one[0].start):
            if run.stop <= at or run.start >= stop:
                continue
            if run.start > at:
                break
            parts.append(stored.read(at - run.start, min(stop, run.stop) - run.start).reshape(-1))
            at = min(stop, run.stop)
        if at < stop:
            run = runs[0][0]
            raise InputError(f"{self.folder}: no rank's file has number {at} of {run.state} of {run.weight}: a hole")
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    def _cut_by(self) -> str:
        given = {"tp": 1, "ep": 1, "tiles": 1, **self.manifest.config}
        return f"tp {given['tp']}, ep {given['ep']} and tiles {given['tiles']}"

    def _instead(self, weight: str) -> str:
        states = self.states(weight)
        if states:
            return f"; it has {', '.join(states)}"
        return "; it is of another model, or trains other weights"
