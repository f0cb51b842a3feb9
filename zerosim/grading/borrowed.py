"""What an answer took of zerosim's own: the functions that would answer the exercise, and changes to the package.

With either an answer could pass every check and be nobody's work. Both are seen while it runs: however it
comes to call zerosim's own answer (it inherits it, calls it, gives it back), that function is called.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from zerosim.analysis import slots
from zerosim.backends.numpy import quantize, rounding
from zerosim.device.allocators import arena
from zerosim.grading.own_code import is_own
from zerosim.ledger import clock
from zerosim.optim.elementwise import Elementwise
from zerosim.parallel import pipeline
from zerosim.parallel.base import RENAMED, Strategy
from zerosim.parallel.tensor import Borders
from zerosim.placement import partition
from zerosim.tensor import flat

_MODULES = (pipeline, arena, quantize, rounding)
"""Whose functions no run of an exercise calls by itself."""


@contextmanager
def noted(names: Sequence[str]) -> Iterator[set[str]]:
    """While this is open, calls of zerosim's own answers under these names are noted, as 'Zero2.publish_params'."""
    seen: set[str] = set()
    today = {name: name for name in names} | {old: new for old, new in RENAMED.items() if new in names}
    own = [(owner, name, vars(owner)[name]) for name in today for owner in _owners(name)]
    for owner, name, function in own:
        called = f"{owner.__name__.removeprefix('zerosim.')}.{today[name]}"
        from_anywhere = isinstance(owner, type) or owner in _MODULES
        setattr(owner, name, _noting(function, called, seen, from_anywhere=from_anywhere))
    try:
        yield seen
    finally:
        for owner, name, function in own:
            setattr(owner, name, function)


def _owners(name: str) -> list[type | ModuleType]:
    """The strategies (the base only where no other has it: its own points are empty), the classes of f and g, the
    arena, the optimizers' rules, and the modules with that name."""
    strategies: list[type] = [each for each in _shipped(Strategy) if name in vars(each)]
    borders: list[type] = [each for each in _shipped(Borders) if name in vars(each)]
    borders += [Borders] if name in vars(Borders) else []
    strategies += [Strategy] if not strategies and name in vars(Strategy) else []
    regions: list[type] = [arena.Arena] if name in vars(arena.Arena) else []
    modules = [module for module in (*_MODULES, partition, flat, clock, slots) if name in vars(module)]
    rules: list[type] = [each for each in _shipped(Elementwise) if name in vars(each)]
    return [*strategies, *borders, *regions, *rules, *modules]


def _shipped(base: type[Any]) -> Iterator[type[Any]]:
    """The package's own subclasses, and theirs."""
    for one in base.__subclasses__():
        if one.__module__.startswith(("zerosim.parallel.", "zerosim.optim.")):
            yield one
        yield from _shipped(one)


def _noting(function: Callable[..., Any], name: str, seen: set[str], *, from_anywhere: bool) -> Callable[..., Any]:
    """A strategy's method may be called for the student by the engine, a pipeline's own schedule out of a table; an
    arena has its own way to compact at hand. Other functions are used by zerosim itself too."""

    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        if from_anywhere or is_own(sys._getframe(1).f_code.co_filename):
            seen.add(name)
        return function(*args, **kwargs)

    return noting


# -- changes ----------------------------------------------------------------------------------------
def state_of_zerosim() -> dict[str, Any]:
    """What zerosim's modules and classes hold by name, and the code of functions. To be compared by identity."""
    held: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name == "zerosim" or name.startswith("zerosim."):
            for key, value in list(vars(module).items()):
                held[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    held |= {f"{name}.{key}.{each}": inner for each, inner in vars(value).items()}
    codes = {f"{name}()": value.__code__ for name, value in held.items() if hasattr(value, "__code__")}
    return held | codes


def changed(before: dict[str, Any]) -> list[str]:
    """The names of what is not what it was, or is new in a class of zerosim's."""
    now = state_of_zerosim()
    classes = {name for name, value in before.items() if isinstance(value, type)}
    other = [name for name in before if now.get(name, _GONE) is not before[name]]
    added = [name for name in now if name not in before and name.rpartition(".")[0] in classes]
    names = [*other, *(name for name in added if not name.rpartition(".")[2].startswith("__"))]  # Python's own caches
    return sorted({name.removesuffix("()") for name in names})


_GONE = object()
