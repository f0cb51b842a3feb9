"""Experts' maps in released files: one by one, where a model here has stacks (`placement/block.py`, Experts)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from zerosim.config.parts.model import ModelConfig
from zerosim.config.safetensors import Planned, Stored
from zerosim.errors import InputError
from zerosim.placement.block import Experts


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


def _of_model(model: ModelConfig) -> Experts | None:
    """Return the row of a model whose files have an expert's maps one by one."""
    row = model.decoder.block.mlp.experts if model.has_blocks else None
    return row if row is not None and row.stored else None


def _names(row: Experts) -> Mapping[str, tuple[str, ...]]:
    """Return an expert's maps of each stack, by the stack's name."""
    first, last = row.stacks
    return {first: row.stored[:-1], last: row.stored[-1:]}


def stacked(found: Mapping[str, Stored], model: ModelConfig) -> dict[str, Any]:
    """Return the tensors of files, with stacks in place of each expert's maps, under the names that they have here."""
    if (row := _of_model(model)) is None:
        return dict(found)
    own = model.decoder.block.mlp.name
    left = {_renamed(name, row.module, own): one for name, one in found.items()}
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
                left[at + stack] = Stack(parts)  # type: ignore[assignment]
    return left


def _pattern(module: str, word: str) -> re.Pattern[str]:
    before, after = map(re.escape, word.split("{}"))
    return re.compile(rf"(.*\.{re.escape(module)}\.){before}(\d+){after}\.weight")


def _renamed(name: str, before: str, after: str) -> str:
    return name.replace(f".{before}.", f".{after}.", 1) if before else name


def unstacked(tensors: list[Planned], model: ModelConfig) -> Iterator[Planned]:
    """Yield the tensors to write, each expert's maps in place of stacks."""
    row = _of_model(model)
    for one in tensors:
        at = None if row is None else next((stack for stack in row.stacks if one.name.endswith(f".{stack}")), None)
        module = "" if row is None else row.module
        own = model.decoder.block.mlp.name if module else ""
        if row is None or at is None:
            yield one._replace(name=_renamed(one.name, own, module) if module else one.name)
            continue
        words, (experts, wide, *rest) = _names(row)[at], one.shape
        each = wide // len(words)
        for expert in range(experts):
            for place, word in enumerate(words):
                name = _renamed(f"{one.name.removesuffix(at)}{word.format(expert)}.weight", own, module)
                values = partial(_window, one.values, expert, slice(place * each, (place + 1) * each))
                yield Planned(name, one.dtype, (each, *rest), values)


def _window(values: Callable[[], Any], expert: int, rows: slice) -> Any:
    return values()[expert, rows]
