"""Compare two plans: the settings that differ, the effect of each one alone, and the changes. Numbers only, no
words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from zerosim.analysis.candidate import Candidate, candidate, candidate_at, taken_back
from zerosim.analysis.compare import last_whole_step
from zerosim.config import OPTIONS, WITH_VALUES, RunConfig
from zerosim.config.parts.model import ModelConfig
from zerosim.errors import InputError
from zerosim.ledger.memory import Snapshot
from zerosim.train.result import RunResult

SENT = "states", "activations"
"""Purposes of the traffic between ranks, without norms and overflow flags."""


class Setting(NamedTuple):
    """A flat field that differs, with both values. `follows`: the value was not given but follows from other
    settings."""

    name: str
    a: Any
    b: Any
    follows: bool


class Totals(NamedTuple):
    """The peak bytes on a rank's device, the average bytes that a rank sends in a step, and the step's seconds."""

    taken_bytes: int
    sent_bytes: Fraction
    seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"taken_bytes": self.taken_bytes, "sent_bytes": float(self.sent_bytes), "step_s": self.seconds}


def settings(a: RunConfig, b: RunConfig) -> list[Setting]:
    """Return the fields whose values differ, in order. A different model brings its sizes."""
    sizes = ModelConfig.options().keys() - {"model"} if a.model.name != b.model.name else set()
    found = []
    for name in OPTIONS:
        values = a.value(name), b.value(name)
        if values[0] != values[1]:
            is_said = name not in sizes and a.given.get(name) != b.given.get(name)
            found.append(Setting(name, *values, follows=not is_said))
    return found


def with_one(a: RunConfig, b: RunConfig, name: str) -> Candidate:
    """Return A with one setting of B's, if they go together; a model brings its sizes."""
    if name == "stage":
        return candidate_at(a, b.parallel.zero_stage)
    names = ModelConfig.options() if name == "model" else (name,)
    return candidate(a, **taken_back(names) | {each: b.given[each] for each in names if each in b.given})


def each_alone(
    a: RunConfig, b: RunConfig, found: list[Setting], totals_of: Callable[[RunConfig], Totals]
) -> dict[str, Totals | str]:
    """Plan A with each given setting of B's alone, or say why that cannot be planned. Settings that affect only values
    are left out."""
    tried: dict[str, Totals | str] = {}
    for name in (one.name for one in found if not one.follows and one.name not in WITH_VALUES.split()):
        one = with_one(a, b, name)
        try:
            tried[name] = one.why_not if one.config is None else totals_of(one.config)
        except InputError as error:
            tried[name] = str(error)
    return tried


def totals(result: RunResult) -> Totals:
    """Return the figures of one plan that a setting may change."""
    taken = max(memory.reserved_bytes for memory in result.memory)
    return Totals(taken, sum(sent(result).values(), Fraction(0)), None if result.time is None else result.time.seconds)


def sent(result: RunResult) -> dict[tuple[str, str], Fraction]:
    """Return the bytes that a rank sends in the last whole step, averaged over ranks, by operation and axis."""
    step, found = last_whole_step(result), Counter[tuple[str, str]]()
    for rank, alike in Counter(result.stands_for).items():
        for row in result.traffic[rank]:
            if row.step == step and row.purpose in SENT and row.wire_bytes:
                found[row.op, row.axis] += alike * row.wire_bytes
    return {key: Fraction(nbytes, len(result.stands_for)) for key, nbytes in found.items()}


def by_units(at: Snapshot) -> dict[tuple[str, str], int]:
    """Return live bytes by group of units and kind. All blocks form one group."""
    found: Counter[tuple[str, str]] = Counter()
    for (unit, kind), nbytes in at.by_unit.items():
        found[group_of(unit), kind] += nbytes
    return dict(found)


def group_of(unit: str) -> str:
    """Return the group of a unit: h.* for h.17, h.*.mlp.c_fc for h.17.mlp.c_fc."""
    return ".".join("*" if part.isdigit() else part for part in unit.split("."))
