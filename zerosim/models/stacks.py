"""Experts' maps in released files: one by one, where a model here has stacks (`placement/block.py`, Experts)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from zerosim.config.parts.model import ModelConfig
from zerosim.config.safetensors import Planned, Stored
from zerosim.errors import InputError
from zerosim.placement.block import BALANCE, Experts


@dataclass(frozen=True, slots=True)
class Stack:
    """The maps of all experts in files: in place of a `Stored` stack. `parts`: each expert's, side by side."""

    parts: tuple[tuple[Stored, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The stack's shape; that of the first maps, where some differ."""
        first = self.parts[0]
        same = len({tuple(one.shape for one in each) for each in self.parts}) == 1
        wide, *rest = first[0].shape
        return (len(self.parts), wide * len(first), *rest) if same else (len(self.parts),)

    def check_float(self) -> None:
        for each in self.parts:
            for one in each:
                one.check_float()

    def fail(self, text: str) -> InputError:
        return self.parts[0][0].fail(text)

    def read(self) -> Any:
        import numpy as np

        return np.stack([np.concatenate([one.read() for one in each]) for each in self.parts])


@dataclass(frozen=True, slots=True)
class Row:
    """A vector that is the one row of a matrix in files: in place of this `Stored`."""

    whole: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        """The row's shape; the tensor's, where it has no such row."""
        shape = tuple(self.whole.shape)
        return shape[1:] if shape[:1] == (1,) else shape

    def check_float(self) -> None:
        self.whole.check_float()

    def fail(self, text: str) -> InputError:
        return self.whole.fail(text)

    def read(self) -> Any:
        return self.whole.read().reshape(self.shape)


def _of_model(model: ModelConfig) -> Experts | None:
    return model.decoder.block.mlp.experts if model.has_blocks else None


def _names(row: Experts) -> Mapping[str, tuple[str, ...]]:
    """Return an expert's maps of each stack, by the stack's name; nothing where files have stacks."""
    first, last = row.stacks
    return {first: row.stored[:-1], last: row.stored[-1:]} if row.stored else {}


def names_here(names: Iterable[str], model: ModelConfig) -> list[str]:
    """Return the names of tensors in files as they are here, but for stacks."""
    row = _of_model(model)
    pairs = [] if row is None else [pair[::-1] for pair in row.in_files]
    return [_renamed(name, pairs) for name in names]


def stacked(found: Mapping[str, Stored], model: ModelConfig) -> dict[str, Any]:
    """Return the tensors of files, with stacks in place of each expert's maps, under the names that they have here."""
    if (row := _of_model(model)) is None:
        return dict(found)
    own = model.decoder.block.mlp.name
    left: dict[str, Any] = dict(zip(names_here(found, model), found.values(), strict=True))
    if row.row_of_biases:
        left |= {name: Row(one) for name, one in left.items() if name.endswith(BALANCE)}
    for stack, words in _names(row).items():
        patterns = [_pattern(own, word) for word in words]
        by_layer = dict[str, dict[int, dict[int, str]]]()
        for name in left:
            for place, pattern in enumerate(patterns):
                if match := pattern.fullmatch(name):
                    by_layer.setdefault(match[1], {}).setdefault(int(match[2]), {})[place] = name
        for at, experts in by_layer.items():
            whole = all(len(each) == len(words) for each in experts.values())
            if whole and sorted(experts) == [*range(len(experts))]:
                parts = tuple(tuple(left[experts[e][place]] for place in range(len(words))) for e in sorted(experts))
                for each in experts.values():
                    for name in each.values():
                        del left[name]
                left[at + stack] = Stack(parts)
    return left


def _pattern(module: str, word: str) -> re.Pattern[str]:
    before, after = map(re.escape, word.split("{}"))
    return re.compile(rf"(.*\.{re.escape(module)}\.){before}(\d+){after}\.weight")


def _renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    for before, after in pairs:
        name = name.replace(before, after, 1)
    return name


def unstacked(tensors: list[Planned], model: ModelConfig) -> Iterator[Planned]:
    """Yield the tensors to write, each expert's maps in place of stacks."""
    if (row := _of_model(model)) is None:
        yield from tensors
        return
    words_of = _names(row)
    for one in tensors:
        at = next((stack for stack in words_of if one.name.endswith(f".{stack}")), None)
        if at is None:
            if row.row_of_biases and one.name.endswith(BALANCE):
                one = one._replace(shape=(1, *one.shape), values=partial(_as_row, one.values))
            yield one._replace(name=_renamed(one.name, row.in_files))
            continue
        words, (experts, wide, *rest) = words_of[at], one.shape
        each = wide // len(words)
        for expert in range(experts):
            for place, word in enumerate(words):
                name = _renamed(f"{one.name.removesuffix(at)}{word.format(expert)}.weight", row.in_files)
                values = partial(_window, one.values, expert, slice(place * each, (place + 1) * each))
                yield Planned(name, one.dtype, (each, *rest), values)


def _as_row(values: Callable[[], Any]) -> Any:
    return values()[None]


def _window(values: Callable[[], Any], expert: int, rows: slice) -> Any:
    return values()[expert, rows]
