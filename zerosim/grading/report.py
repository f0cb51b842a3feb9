"""A grade, and its display: as text in a terminal, as a table in a notebook."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from typing import TYPE_CHECKING

from zerosim.errors import InputError
from zerosim.grading.exercise import Exercise
from zerosim.grading.limits import Failure
from zerosim.grading.record import LiveBytes, Where
from zerosim.grading.verdict import Check, Verdict
from zerosim.units import few

if TYPE_CHECKING:
    from zerosim.playback import Player
    from zerosim.report.plots.chart import Chart

_MARKS = {True: "[ok]", False: "[no]", None: "[--]"}
_COLOURS = {True: "#2a7d4f", False: "#b3361e", None: "#777777"}
_MOST_UNITS = 8
_PRE = "margin:0;text-align:left;white-space:pre-wrap"


@dataclass(frozen=True, slots=True)
class Grade:
    """The result of an answer: its checks, the parts still to write, or why nothing of it counts.

    A check gives one point; if one fails that the exercise names as decisive, none does.
    """

    exercise: Exercise
    verdict: Verdict

    @property
    def checks(self) -> tuple[Check, ...]:
        return self.verdict.checks

    @property
    def title(self) -> str:
        return f"Exercise {self.exercise.number}, {self.exercise.title}"

    @property
    def passed(self) -> bool:
        return self.state == "solved"

    @property
    def state(self) -> str:
        """'solved', 'failed' or 'unsolved'."""
        if self.verdict.unsolved is not None:
            return "unsolved"
        holds = bool(self.checks) and all(check.passed for check in self.checks) and not self.verdict.void
        return "solved" if holds else "failed"

    @property
    def undecided(self) -> tuple[str, ...]:
        """The decisive checks that do not hold."""
        held = {check.name for check in self.checks if check.passed}
        return tuple(name for name in self.exercise.decisive if name not in held)

    @property
    def points(self) -> int:
        counts = self.verdict.unsolved is None and not self.verdict.void and not self.undecided
        return sum(check.passed is True for check in self.checks) if counts else 0

    @property
    def possible(self) -> int:
        """Points of a solution: one per check, and one for runs that end."""
        return len(self.exercise.judges) + bool(self.exercise.cases) + (self.exercise.examine is not None)

    @property
    def score(self) -> Fraction:
        """The exercise's weight, times the share of points reached."""
        return Fraction(self.exercise.weight * self.points, self.possible)

    @property
    def failures(self) -> tuple[Check, ...]:
        return self.verdict.failures

    def __getitem__(self, name: str) -> Check:
        """Return the check of that name. Raises: InputError if there is none."""
        for check in self.checks:
            if check.name == name:
                return check
        names = ", ".join(check.name for check in self.checks) or "none: not solved yet"
        raise InputError(f"no check {name!r} in this grade; choose one of {names}")

    def plot(self) -> Chart:
        """Draw the answer's run beside the reference's: live bytes and collectives of one rank (`picture.py`).

        Raises: InputError if the answer did not run.
        """
        from zerosim.grading.picture import drawn

        return drawn(self.exercise, self.verdict)

    def player(self) -> Player:
        """Play the answer's run beside the reference's, from the event that the first failure names (`playing.py`).

        Raises: InputError if the answer did not run.
        """
        from zerosim.grading.playing import played

        return played(self.exercise, self.verdict)

    def __str__(self) -> str:
        lines = [f"{self.title}: {_verdict(self)}"]
        if self.verdict.unsolved is not None:
            return "\n".join([*lines, *(f"  {words}" for words in _unsolved(self, self.verdict.unsolved))])
        shown: list[Where] = []
        lines += [f"  {words}" for words in self.verdict.hooks]
        for check in self.checks:
            lines.append(f"  {_MARKS[check.passed]} {check.name:<9} {_sentence(check)}")
            lines += [f"       {words}" for words in _details(check, shown)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        head = f"<p><b>{escape(self.title)}</b>: {escape(_verdict(self))}</p>"
        if self.verdict.unsolved is not None:
            return head + "".join(f"<p>{escape(words)}</p>" for words in _unsolved(self, self.verdict.unsolved))
        shown, first = list[Where](), next(iter(self.failures), None)
        called = chr(10).join(self.verdict.hooks)
        head += f'<pre style="{_PRE}">{escape(called)}</pre>' if called else ""
        return head + f"<table>{''.join(_row(check, shown, check is first) for check in self.checks)}</table>"


def brief(grade: Grade) -> str:
    """Return a grade with its first failure in full, the root cause, and the names of the checks that failed or
    wait."""
    first = next(iter(grade.failures), None)
    lines = [f"{grade.title}: {_verdict(grade)}"]
    if not grade.verdict.void:  # else that is the root cause
        if first is None:
            return str(grade)
        lines += [f"  {words}" for words in grade.verdict.hooks]
        lines.append(f"  {_MARKS[False]} {first.name:<9} {_sentence(first)}")
        lines += [f"       {words}" for words in _details(first, [])]
    for mark, words in (
        (True, "holds"),
        (False, "fails" if grade.verdict.void else "fails too"),
        (None, "not reached"),
    ):
        shown = None if grade.verdict.void else first
        names = [check.name for check in grade.checks if check.passed is mark and check is not shown]
        lines += [f"  {_MARKS[mark]} {words}: {', '.join(names)}"] if names else []
    return "\n".join(lines)


def _verdict(grade: Grade) -> str:
    if grade.state == "unsolved":
        return "not solved yet"
    return f"{grade.points} of {grade.possible} points" + (", solved" if grade.passed else _why_none(grade))


def _why_none(grade: Grade) -> str:
    """Return why passed checks give no point, '' if they do or none passed."""
    if grade.verdict.void:
        return f": {grade.verdict.void}"
    failed = [check.name for check in grade.failures if check.name in grade.undecided]
    if not failed or not any(check.passed for check in grade.checks[1:]):
        return ""
    return ": the weights are wrong" if "weights" in failed else f": nothing counts without {' and '.join(failed)}"


def _unsolved(grade: Grade, unsolved: Failure) -> list[str]:
    where = [f"It is reached at {unsolved.line.split(':')[0]}."] if unsolved.line else []
    return [f"To write: {unsolved.text}.", *where, f"Hint: {grade.exercise.hint(1)}"]


def _sentence(check: Check) -> str:
    if check.passed is None:
        return "not reached: a run ended before it"
    if check.passed:
        return f"{check.expected}: {check.counted}"
    case = f" (case: {check.case})" if check.case else ""
    return f"expected {check.expected}{case}"


def _details(check: Check, shown: list[Where]) -> list[str]:
    """Yield the details of a failure, one line each. Live buffers are shown once, and added to `shown`."""
    if check.passed is not False:
        return []
    lines = [f"found:  {check.counted}"]
    if check.line:
        lines.append(f"line:   {check.line}")
    if check.where is not None:
        lines.append(f"where:  {check.where}")
        if check.where.live and check.where not in shown:
            shown.append(check.where)
            lines.append(f"live:   {sum(held.nbytes for held in check.where.live):,} B on rank {check.where.rank}")
            lines += [f"        {words}" for words in live_words(check.where)]
    if check.hint:
        lines.append(f"hint:   {check.hint}")
    return lines


def live_words(where: Where) -> list[str]:
    """Return the live bytes by kind, and of which units."""
    kinds: dict[str, list[LiveBytes]] = {}
    for held in where.live:
        kinds.setdefault(held.kind, []).append(held)
    width = max((len(kind) for kind in kinds), default=0)
    return [
        f"{kind:<{width}} {sum(held.nbytes for held in rows):>9,} B  {_units(held.unit for held in rows)}"
        for kind, rows in kinds.items()
    ]


def _units(names: Iterable[str]) -> str:
    counts = Counter(name or "outside units" for name in names)
    return few([name if count == 1 else f"{name} ({count})" for name, count in counts.items()], _MOST_UNITS)


def _row(check: Check, shown: list[Where], is_first: bool) -> str:
    """Return a check as a row of a table. Details of failures after the first, the root cause, are folded."""
    details = _details(check, shown)
    more = f'<pre style="{_PRE}">{escape(chr(10).join(details))}</pre>' if details else ""
    more = f"<details><summary>details</summary>{more}</details>" if more and not is_first else more
    mark = f'<td style="color:{_COLOURS[check.passed]};vertical-align:top"><b>{_MARKS[check.passed]}</b></td>'
    name = f'<td style="text-align:left;vertical-align:top">{escape(check.name)}</td>'
    return f'<tr>{mark}{name}<td style="text-align:left">{escape(_sentence(check))}{more}</td></tr>'


def drawable(grades: list[Grade]) -> Grade | None:
    """Return the first grade that failed and has a run to draw, else the first that has one."""
    there = [one for one in grades if one.verdict.recorded is not None]
    return next((one for one in there if not one.passed), next(iter(there), None))
