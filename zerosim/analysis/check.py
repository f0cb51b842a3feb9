"""A count beside its closed form, as one value: tables, pages, comparisons and JSON show the same.

Agreement means equality of exact numbers, never a tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from zerosim.analysis.capability import Key
from zerosim.analysis.formulas import BytesPerParameter, Form
from zerosim.analysis.shares import Share
from zerosim.analysis.weights import shown
from zerosim.ledger.traffic import TrafficRow
from zerosim.train.result import RunResult


@dataclass(frozen=True, slots=True)
class Check:
    """Bytes of the ranks of a pipeline stage beside their closed form.

    key        the form's key. Its name may also be 'total'
    counted    by rank
    form       as shown, in the letters that are not 0; None: there is no closed form
    formula    its value for a rank, without padding
    expected   the bytes that each rank must have, padding included, or the mean. Empty: the form is shown, but is not
               the number
    even       if `expected` is one number, every rank must have it
    padding    of `counted`, by rank, where padding is counted apart
    calls, dtypes, payload   of the messages or copies that a rank made
    modelled   messages were not observed: `counted` is a ring's traffic
    """

    key: Key
    counted: tuple[int | Fraction, ...]
    form: Form | None
    formula: Fraction | None
    expected: tuple[Fraction, ...]
    even: bool = True
    padding: tuple[int, ...] = ()
    calls: int | None = None
    dtypes: tuple[str, ...] = ()
    payload: int = 0
    modelled: bool = False

    @property
    def name(self) -> str:
        return self.key.name

    @property
    def axis(self) -> str:
        return self.key.axis

    @property
    def label(self) -> str:
        """The name, with the memory in which a state lies."""
        return f"{self.name} in {self.axis}" if self.key.subject == "lies" else self.name

    @property
    def text(self) -> str:
        return "" if self.form is None else str(self.form)

    @property
    def mean(self) -> Fraction:
        """The mean bytes per rank, without padding that is counted apart."""
        return Fraction(sum(self.counted) - sum(self.padding), len(self.counted))

    @property
    def with_padding(self) -> Fraction:
        """The mean bytes that ranks must have, padding included; those that they have, where no number is due."""
        due = self.expected or self.counted
        return Fraction(sum(due), len(due))

    @property
    def agrees(self) -> bool | None:
        """Whether the count is the form's number; None if there is none."""
        if not self.expected:
            return None
        if self.padding and self.mean != self.formula:
            return False
        if len(self.expected) > 1:
            return self.counted == self.expected
        if self.even and len(set(self.counted)) > 1:
            return False
        return Fraction(sum(self.counted), len(self.counted)) == self.expected[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: the mean bytes that were counted and, padding included, those of the formula."""
        due = {"formula": self.text, "expected": _number(self.with_padding)} if self.expected else {}
        where = {"axis": self.axis} if self.axis else {}
        counted = _number(Fraction(sum(self.counted), len(self.counted)))
        named = {"subject": self.key.subject, "name": self.name, **where}
        return {**named, "counted": counted, **due, "agrees": self.agrees}


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


class Compared(NamedTuple):
    """The ranks of a pipeline stage at a step (None: at the end), with the closed forms and their letters' values."""

    result: RunResult
    share: Share
    step: int | None
    forms: Mapping[Key, Form]
    cost: BytesPerParameter
    held: Mapping[str, int]
    padded: Mapping[str, int]

    @property
    def ranks(self) -> list[int]:
        """The ranks that ran."""
        return list(dict.fromkeys(self.result.stands_for[rank] for rank in self.share.ranks))

    def shown(self, form: Form) -> Form:
        return shown(form, self.held)

    def rows(self, purpose: str) -> list[tuple[int, TrafficRow]]:
        """Return the rows of the step with this purpose, with their ranks; a save is no part of it."""
        return [
            (rank, row)
            for rank in self.ranks
            for row in self.result.traffic[rank]
            if row.step == self.step and row.purpose == purpose and not row.saves
        ]
