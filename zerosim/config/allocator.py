"""The knobs of an allocator, read from one string in the syntax of PyTorch's PYTORCH_CUDA_ALLOC_CONF.

    expandable_segments:True,max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:4]

Names, ranges and defaults of the caching allocator's knobs are PyTorch's. Source: PyTorch, CUDA semantics, "Optimizing
memory usage", and c10/core/AllocatorConfig.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeVar

from zerosim.errors import did_you_mean, wrong

NAMES = ("exact", "caching", "arena")
INTERVALS = 16  # of roundup_power2_divisions: sizes from 1 MiB, 2 MiB, 4 MiB and so on
_LEAST_MB = 20  # a large segment: blocks below it are always split

Knobs = TypeVar("Knobs")


@dataclass(frozen=True, slots=True)
class CachingKnobs:
    """Knobs of PyTorch's caching allocator. Its megabytes are MiB; divisions by interval, 0 for rounding to 512
    bytes."""

    max_split_size_mb: int | None = None
    max_non_split_rounding_mb: int = _LEAST_MB
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False


@dataclass(frozen=True, slots=True)
class ArenaKnobs:
    """Knobs of one contiguous region: which hole a request gets, and whether live bytes may be moved to make one."""

    fit: str = "best"
    defragment: bool = True


def caching_knobs(text: str | None) -> CachingKnobs:
    """Read the caching allocator's knobs. Raises: InputError for an unknown key or value."""
    return _read("caching", CachingKnobs, text)


def arena_knobs(text: str | None) -> ArenaKnobs:
    """Read the arena's knobs. Raises: InputError for an unknown key or value."""
    return _read("arena", ArenaKnobs, text)


def check_knobs(allocator: str, text: str | None) -> None:
    """Check knobs. Raises: InputError if the allocator of that name cannot read them."""
    if allocator == "caching":
        caching_knobs(text)
    elif allocator == "arena":
        arena_knobs(text)
    elif text is not None:
        raise wrong("allocator_conf", f" {text!r}: {allocator} has no settings; pass --allocator caching or arena too")


def _read(allocator: str, kind: type[Knobs], text: str | None) -> Knobs:
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    values: dict[str, Any] = {}
    for pair in pairs(text or ""):
        key, colon, word = pair.partition(":")
        if key not in known:
            hint = did_you_mean(key, known, f"expected one of {', '.join(known)}")
            raise wrong("allocator_conf", f": {allocator} has no setting {key!r}: {hint}")
        if key in values:
            raise wrong("allocator_conf", f": {key} is given twice")
        if not colon or not word:
            raise wrong("allocator_conf", f" {pair!r}: expected {key}:VALUE")
        values[key] = _VALUES[key](key, word)
    return kind(**values)


def pairs(text: str) -> list[str]:
    """Split 'a:1,b:[2:3,>:4]' at the commas outside brackets; blanks mean nothing, as in PyTorch."""
    compact = text.replace(" ", "")
    if compact.count("[") != compact.count("]"):
        raise wrong("allocator_conf", f" {text!r}: a bracket is not closed")
    pairs = re.split(r",(?![^\[]*\])", compact)
    if pairs[-1] == "":  # PyTorch accepts a comma at the end, and an empty string
        pairs.pop()
    return pairs


def _megabytes(key: str, word: str) -> int:
    if not word.isascii() or not word.isdigit() or len(word) > 15 or int(word) < _LEAST_MB:
        raise wrong("allocator_conf", f": {key} {word!r}: expected a whole number of MiB, at least {_LEAST_MB}")
    return int(word)


def _share(key: str, word: str) -> float:
    try:
        share = float(word)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise wrong("allocator_conf", f": {key} {word!r}: expected a number between 0 and 1, neither of them")
    return share


def _boolean(key: str, word: str) -> bool:
    if word not in ("True", "False"):
        raise wrong("allocator_conf", f": {key} {word!r}: expected True or False")
    return word == "True"


def _fit(key: str, word: str) -> str:
    if word not in ("best", "first"):
        raise wrong("allocator_conf", f": {key} {word!r}: expected best or first")
    return word


def _divisions(key: str, word: str) -> tuple[int, ...]:
    """Read a power of two for all sizes, or '[64:8,128:2,>:1]': from 64 MiB (and below), from 128 MiB, and beyond."""
    if not word.startswith("["):
        return (_power_of_two(key, word),) * INTERVALS
    divisions, last = [0] * INTERVALS, -1
    for pair in word.strip("[]").split(","):
        start, _, count = pair.partition(":")
        value = 0 if count == "0" else _power_of_two(key, count)
        if start == ">":
            divisions[last + 1 :] = [value] * (INTERVALS - last - 1)
            continue
        interval = min(_power_of_two(key, start).bit_length() - 1, INTERVALS - 1)
        if last < 0:
            divisions[:interval] = [value] * interval
        divisions[interval], last = value, interval
    return tuple(divisions)


def _power_of_two(key: str, word: str) -> int:
    if not word.isascii() or not word.isdigit() or len(word) > 15 or int(word).bit_count() != 1:
        raise wrong("allocator_conf", f": {key} {word!r}: expected a power of two, or pairs such as [256:1,512:2,>:4]")
    return int(word)


_VALUES: Mapping[str, Callable[[str, str], Any]] = MappingProxyType(
    {
        "max_split_size_mb": _megabytes,
        "max_non_split_rounding_mb": _megabytes,
        "roundup_power2_divisions": _divisions,
        "garbage_collection_threshold": _share,
        "expandable_segments": _boolean,
        "fit": _fit,
        "defragment": _boolean,
    }
)
