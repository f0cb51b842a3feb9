"""A file of another framework as it was read: values of a run, and what became of each key.

A reader (`deepspeed.py` and the others) walks a `Document` in a `Context` and tells `Notes` of every key. A key is
understood (it sets options here), filled ("auto"), ignored (by that framework too, or without effect on a step),
lacking (not modelled) or refused. `Reading.check` refuses what cannot be planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from zerosim.config.run import RunConfig
from zerosim.dialects.rows import Row, row_of
from zerosim.errors import InputError, did_you_mean

ALWAYS = "always on here"
"""What a row says of a key that has one value in zerosim."""


class Document(NamedTuple):
    """A parsed file. `keys`: each value by its name with dots, in the file's order. An empty section is a key too.

    `environment`: variables that a script sets. `is_hjson`: only DeepSpeed itself reads it; it is no plain JSON.
    """

    path: str
    dialect: str
    keys: Mapping[str, Any]
    environment: Mapping[str, str] = {}
    is_hjson: bool = False

    def named(self, name: str) -> list[str]:
        """Return the keys that a name means: a key, or all of a section; an argument without its hyphens too."""
        plain = name.lstrip("-")
        return [key for key in self.keys if key.lstrip("-") == plain or key.lstrip("-").startswith(f"{plain}.")]

    def without(self, name: str) -> Document:
        """Return the document without a key or a section. Raises: InputError if it has neither."""
        if not (gone := self.named(name)):
            known = {part for key in self.keys for part in (key, key.rpartition(".")[0]) if part}
            hint = did_you_mean(name, known, f"its keys are {', '.join(self.keys)}")
            raise InputError(f"--without {name}: {self.path} has no such key; {hint}")
        return self._replace(keys={key: value for key, value in self.keys.items() if key not in gone})

    def section(self, name: str) -> Mapping[str, Any]:
        """Return the keys under `name.`, without it."""
        return {key[len(name) + 1 :]: value for key, value in self.keys.items() if key.startswith(f"{name}.")}


@dataclass(frozen=True)
class Context:
    """What a file does not say.

    given     values of flags, by option; they also replace a file's
    before    the file that was read before this one, such as TrainingArguments before a ds_config.json
    launcher  who reads the file: trainer, accelerate or deepspeed; '' for the one that the file looks like
    versions  of libraries, as numbers; others are those that the facts were found with
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    before: Reading | None = None
    launcher: str = ""
    versions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def older(self, library: str, *version: int) -> bool:
        """Return whether the file is read as by a version of this library below this one."""
        return library in self.versions and self.versions[library] < version

    def flag(self, name: str) -> Any:
        """Return the value of a flag; None for one that only the file read before has."""
        value = self.given.get(name)
        return None if self.before is not None and self.before.values.get(name) == value else value

    @cached_property
    def sizes(self) -> RunConfig | None:
        """The model of --model on one rank; None without one."""
        names = ("model", "layers", "hidden", "heads", "kv_heads", "ffn", "seq", "vocab", "experts", "top_k")
        given = {name: self.given[name] for name in names if name in self.given}
        return RunConfig(**given, ranks=1) if "model" in given else None

    @property
    def hidden(self) -> int | None:
        """The width of --model."""
        return None if self.sizes is None else self.sizes.model.hidden


class Said(NamedTuple):
    """What became of one key: `how` is understood, auto, ignored, lacking or refused."""

    key: str
    value: Any
    how: str
    text: str


class Refusal(NamedTuple):
    """Why a file cannot be planned: the key, who refuses it, why, and what to type."""

    key: str
    by: str
    why: str
    advice: str = ""


@dataclass(frozen=True)
class Reading:
    """A file as values of a run.

    reader    whose rules were used, with versions
    values    by option; the configuration is these, with flags over them
    sources   by option, the key, default or flag that the value comes from
    said      a line for each key, in the file's order
    notes     sentences about the whole
    refusals  the first one stops a plan
    """

    document: Document
    reader: str
    values: Mapping[str, Any]
    sources: Mapping[str, str]
    said: tuple[Said, ...]
    notes: tuple[str, ...]
    refusals: tuple[Refusal, ...] = ()
    rows: Mapping[str, Row] = field(default_factory=dict)

    def of(self, how: str) -> dict[str, str]:
        """Return the keys of which this became, and the words about each."""
        return {said.key: said.text for said in self.said if said.how == how}

    def check(self) -> None:
        """Check the file. Raises: InputError, in one line with the key and what the framework itself would do."""
        plain = dict.fromkeys(key.lstrip("-") for one in self.refusals for key in one.key.split(", "))
        for one in self.refusals:
            way = one.advice or f"--without {','.join(plain)} plans the rest"
            raise InputError(f"{self.document.path}: {one.key}: {one.by}: {one.why}; {way}")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "path": self.document.path,
            "dialect": self.document.dialect,
            "read_as": self.reader,
            "values": {name: list(one) if isinstance(one, tuple) else one for name, one in self.values.items()},
            "sources": dict(self.sources),
            "keys": [one._asdict() for one in self.said],
            "notes": list(self.notes),
            "refused": [one._asdict() for one in self.refusals],
        }


@dataclass
class Notes:
    """What a reader finds out, while it walks a document."""

    document: Document
    context: Context
    rows: Mapping[str, Row]
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    said: dict[str, Said] = field(default_factory=dict)
    texts: dict[str, None] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)

    def sets(self, key: str, how: str = "understood", /, text: str = "", **values: Any) -> None:
        """Set options from a key, or from a default that it names in words."""
        for name, value in values.items():
            self.values[name], self.sources[name] = value, key
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        self.tell(key, how, f"{shown}: {text}" if shown and text else shown or text)

    def usually(self, source: str, **values: Any) -> None:
        """Set options that no key sets, from a default of the framework."""
        for name, value in values.items():
            if name not in self.values:
                self.values[name], self.sources[name] = value, source

    def tell(self, key: str, how: str, text: str) -> None:
        """Say what became of a key of the document; of another name, nothing."""
        if key in self.document.keys:
            before = self.said.get(key)
            text = f"{before.text}; {text}" if before is not None and before.how == how else text
            self.said[key] = Said(key, self.document.keys[key], how, text)

    def note(self, text: str) -> None:
        """Add a sentence about the file."""
        self.texts[text] = None

    def lacks(self, key: str, what: str, *, by: str = "zerosim", costs: bool | None = None, advice: str = "") -> None:
        """Say that a key is not modelled. One that changes a step (by its row, or `costs`) is refused, except at the
        framework's default."""
        row = row_of(self.rows, key)
        costly = costs if costs is not None else row is not None and row.costs
        at_default = row is not None and costs is None and row.is_default(self.document.keys.get(key))
        self.tell(key, "lacking", what)
        if costly and not at_default:
            changes = f", and it changes {row.changes.replace(' ', ', ')}" if row is not None and row.changes else ""
            self.refuse(key, by, f"{what}: not modelled{changes}", advice)

    def refuse(self, key: str, by: str, why: str, advice: str = "") -> None:
        """Refuse the file for this key."""
        self.refusals.append(Refusal(key, by, why, advice))
        for one in key.split(", "):
            self.tell(one, "refused", why)

    def checked(self, key: str, by: str, value: Any = None, error_of: str = "") -> Any:
        """Return a key's value, or the one that was filled in, as its row's kind stores it; refuse the file, and
        return None, for another kind."""
        value = self.document.keys[key] if value is None else value
        try:
            return self.rows[key].kind(value)
        except (ValueError, OverflowError) as error:
            self.refuse(key, by, f"{error_of}{value!r}: {error}")
            return None

    def walk_rows(self) -> None:
        """Say of all keys that no rule has read what their rows say."""
        for key, value in self.document.keys.items():
            row = row_of(self.rows, key)
            if key in self.said or row is None:
                continue
            if row.here == ALWAYS and row.is_default(value):
                self.tell(key, "understood", row.here)
            elif row.option:
                self.sets(key, **{row.option: value})
            elif row.says == "ignored" or row.changes in ("", "none"):
                self.tell(key, "ignored", row.does)
            else:
                self.lacks(key, row.does)

    def reading(self, reader: str) -> Reading:
        """Return the whole, with the document's keys in its order."""
        said = tuple(self.said[key] for key in self.document.keys if key in self.said)
        return Reading(
            self.document, reader, self.values, self.sources, said, tuple(self.texts), tuple(self.refusals), self.rows
        )


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested sections as one mapping with dotted keys. An empty section stays, as {}."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def with_given(context: Context, /, **given: Any) -> Context:
    """Return the context with further values, below those of flags."""
    return dataclasses.replace(context, given={**given, **context.given})
