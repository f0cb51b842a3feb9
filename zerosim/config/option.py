"""One field of a configuration: its range, choices, default and help, all beside the field's declaration.

`option` puts them into the field's metadata. Checks, the command line's flags and the keys of a scenario file are read
from there. Outside the parts an option has a flat name (`stage` for `parallel.zero_stage`): a keyword of
`RunConfig(...)`, a flag and a TOML key.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from zerosim.errors import InputError, did_you_mean, wrong
from zerosim.units import LONGEST_NUMBER

OF_RECIPE = "the recipe's"

_KINDS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "None": (type(None),)}
)
_PAIR = "tuple[float, float]"


@dataclass(frozen=True, slots=True)
class Option:
    """A field's allowed values, and its texts on the command line.

    help        one line
    flat        its name outside the part; by default the field's own
    low, high   allowed bounds; `above` and `below` are excluded ones. They hold for each of two numbers
    choices     the accepted words
    metavar     the value's name in help; by default `choices`, if it has any
    shown       the default in words, if the value itself says too little
    also        other names that people type for its flag
    parse       turns text such as '32GB' into the value, or a word into its stored form
    stages      the ZeRO stages that have it: at another one it may only have its default
    group       its heading in `--help-all`; by default its part's
    after       the option behind which it stands there, or the heading; by default the last in its part's order
    words       other frameworks' names for it, with the same values
    switches    other frameworks' switches, and the value that each means
    follows     a recipe, an optimizer or a precision may set it (`layers.py`); its default is the paper's, with Adam
    """

    help: str
    flat: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str | tuple[str, ...] = ""
    shown: str | None = None
    also: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    stages: tuple[int, ...] = (0, 1, 2, 3)
    group: str = ""
    after: str = ""
    words: str = ""
    switches: Mapping[str, str | bool] = dataclasses.field(default_factory=dict)
    follows: bool = False
    # Read from the field itself:
    attribute: str = ""
    default: Any = None
    kinds: tuple[str, ...] = ()

    @property
    def none_is_a_value(self) -> bool:
        """Whether None is a meaningful value, as for --bucket-bytes. For other options it removes a given value."""
        return "None" in self.kinds and self.default is not None

    def checked(self, value: Any) -> Any:
        """Return the value as the field stores it. Raises: InputError for another type, word or range."""
        self.check(value := self.taken(value))
        return value

    def taken(self, value: Any) -> Any:
        """Return the value as the field stores it. Raises: InputError for one of another type."""
        if isinstance(value, str) and self.parse is not None:
            try:
                value = self.parse(value)
            except InputError as error:
                raise wrong(self.flat, f" {error}") from None
        for number in value if isinstance(value, tuple) else [value]:
            if isinstance(number, int) and abs(number) >= 10**LONGEST_NUMBER:
                raise wrong(self.flat, f": a whole number of more than {LONGEST_NUMBER} digits is too large")
        if self.kinds[0] == _PAIR:
            if not (isinstance(value, tuple) and len(value) == 2 and all(isinstance(b, float | int) for b in value)):
                raise wrong(self.flat, f" {value!r}: expected two numbers")
            return value
        allowed = tuple(kind for name in self.kinds for kind in _KINDS[name])
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            expected = " or ".join(name for name in self.kinds if name != "None")
            raise wrong(self.flat, f" {value!r}: expected {expected}")
        if isinstance(value, float) and not math.isfinite(value):
            raise wrong(self.flat, f" {value}: expected a finite number")
        return known_word(value, self.choices) or value if isinstance(value, str) else value

    def check(self, value: Any) -> None:
        """Check a value. Raises: InputError for an unknown word, and a number out of range."""
        if value is None or isinstance(value, bool):
            return
        if isinstance(value, tuple):
            for index, number in enumerate(value, start=1):
                self._check_number(number, f": {self.flat.removesuffix('s')}{index}")
        elif self.choices and value not in self.choices:
            near = did_you_mean(value, self.choices, "", most=2)
            raise wrong(self.flat, f" {value!r}: expected one of {', '.join(self.choices)}{near and '; '}{near}")
        elif isinstance(value, int | float):
            self._check_number(value)

    def _check_number(self, value: float, which: str = "") -> None:
        if self.below is not None:
            if not (self.low or 0) <= value < self.below:
                raise wrong(self.flat, f"{which} {value}: expected a number in [{self.low or 0}, {self.below})")
            return
        too_low = (self.low is not None and value < self.low) or (self.above is not None and value <= self.above)
        if too_low or (self.high is not None and value > self.high):
            least = f"more than {self.above}" if self.above is not None else f"at least {self.low}"
            most = "" if self.high is None else f" and at most {self.high}"
            raise wrong(self.flat, f"{which} {value}: expected {least}{most}")


def known_word(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was meant: AdamW is adamw, and reduce-scatter reduce_scatter. None if there is
    none."""
    words = {_plain(each): each for each in known}
    return words.get(_plain(word))


def _plain(word: str) -> str:
    return word.strip().lower().replace("-", "_")


def option(default: Any, help: str, *, follows: str = "", shown: str | None = None, **metadata: Any) -> Any:
    """Declare a dataclass field with an `Option` of these values in its metadata. `follows`: in words, the source of
    its value."""
    declared = Option(help, shown=follows or shown, follows=bool(follows), **metadata)
    return dataclasses.field(default=default, metadata={"option": declared})


class Exclusion(NamedTuple):
    """Two options of which at most one may differ from its default. With `needs`, `first` may only if `second` does."""

    first: str
    second: str
    why: str = ""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    needs: bool = False


class Draft(NamedTuple):
    """Values by flat name before any part is built, the source of each ('' for given ones), the given ones, and the
    ZeRO stage."""

    values: dict[str, Any]
    source: Mapping[str, str]
    given: Mapping[str, Any]
    stage: int

    def without(self, name: str, why: str) -> dict[str, str]:
        """Take a recipe's value out of `values`, if it set one. Return which, and why."""
        if name not in self.values or not self.source[name]:
            return {}
        return {name: f"{self.source[name]}'s {name}{shown(self.values.pop(name))}, {why}"}


def shown(value: Any) -> str:
    """Return a value behind its option's name; nothing if the name alone says it."""
    return "" if value is True else f" {value!r}"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a configuration, with a value in every field. `RunConfig` builds it from values that `Option`
    checked. `group` is the heading of its options in `--help-all`."""

    group: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self._check()

    @classmethod
    def options(cls) -> Mapping[str, Option]:
        """Return its options by flat name, in the order of its fields."""
        part: Any = cls  # its instances have their own __hash__, which mypy takes for the class's
        return _options_of(part)

    def _check(self) -> None:
        """Check which fields go together. Raises: InputError."""


@cache
def _options_of(part: type[Any]) -> Mapping[str, Option]:
    options = (
        dataclasses.replace(
            declared,
            flat=declared.flat or field.name,
            attribute=field.name,
            group=declared.group or part.group,
            default=field.default,
            kinds=tuple(str(field.type).split(" | ")),
        )
        for field in dataclasses.fields(part)
        if (declared := field.metadata.get("option")) is not None
    )
    return MappingProxyType({option.flat: option for option in options})
