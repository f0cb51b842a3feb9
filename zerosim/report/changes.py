"""Two files: the settings that differ, and the effect of each alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.table import Column

from zerosim.analysis.changes import Alone, Setting, Totals
from zerosim.report.interval import three_figures
from zerosim.report.look import Adaptive, Grid, right, titled
from zerosim.report.names import counted
from zerosim.units import format_bytes


class Changes(NamedTuple):
    """The settings that differ from A to B, the totals of both, and A's with `each` setting alone, where planned."""

    settings: Sequence[Setting]
    before: Totals
    after: Totals
    each: Sequence[Alone]
    paths: Sequence[str]

    def answer(self) -> str:
        """Return how many settings differ, and by how much the three figures do."""
        if not self.settings:
            return "No setting differs: both are the same."
        number, a, b = sum(not setting.follows for setting in self.settings), self.before, self.after
        moved = [f"peak {_part(a.taken_bytes, b.taken_bytes)}", f"sent {_part(a.sent_bytes, b.sent_bytes)}"]
        if a.seconds is not None and b.seconds is not None:
            moved.append(f"step {_part(a.seconds, b.seconds)}")
        return f"{counted(number, 'setting')} differ{'s' * (number == 1)}. From A to B: {', '.join(moved)}."

    def table(self) -> RenderableType | None:
        """Return the table of given settings, beside A's figures with B's value of that one alone."""
        if not self.settings:
            return None
        alone = {one.setting.name: one.totals for one in self.each}
        grid = Grid(Column("setting", overflow="fold"), "A", "B", right("peak"), right("sent"), right("step"))
        for setting in self.settings:
            if not setting.follows:
                grid.add(setting.name, _value(setting.a), _value(setting.b), *self._moved(alone.get(setting.name)))
        grid.rule()
        grid.add("all together", None, None, *self._moved(self.after), style="bold")
        notes = ["Peak, sent, step: the change of A's figures with that one setting of B."] * bool(self.each)
        notes += [f"{one.setting.name} cannot stand alone: {one.why_not}." for one in self.each if one.why_not]
        brought = [f"{one.name} {_value(one.a)} → {_value(one.b)}" for one in self.settings if one.follows]
        notes += [f"These follow: {', '.join(brought)}."] * bool(brought)
        return titled("Settings that differ", Adaptive(grid.filled()), "\n".join(notes))

    def _moved(self, after: Totals | None) -> list[str | None]:
        """Return by how much A's figures change."""
        both = [] if after is None else zip(self.before, after, strict=True)
        return [None if a is None or b is None else signed(b - a) for a, b in both]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "files": list(self.paths),
            "settings": [setting._asdict() for setting in self.settings],
            "totals": {"A": _totals(self.before), "B": _totals(self.after)},
            "alone": [
                {"name": one.setting.name, **({"error": one.why_not} if one.totals is None else _totals(one.totals))}
                for one in self.each
            ],
        }


def signed(change: Any) -> str:
    """Return '+353 MB', or of a number of seconds '-0.0064 s'."""
    return f"{'-' if change < 0 else '+'}{_plain(abs(change))}" if change else "0"


def _plain(value: Any) -> str:
    return f"{three_figures(value)} s" if isinstance(value, float) else format_bytes(round(value))


def _part(a: Any, b: Any) -> str:
    """Return '45.0 GB → 38.0 GB (-16 %)'."""
    if a == b:
        return f"{_plain(a)} in both"
    percent = float(100 * (b - a) / a) if a else 0.0
    return f"{_plain(a)} → {_plain(b)}" + (f" ({percent:+,.{int(abs(percent) < 10)}f} %)" if a else "")


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return f"{value:,.10g}" if isinstance(value, int | float) else str(value)


def _totals(figures: Totals) -> dict[str, Any]:
    return {"taken_bytes": figures.taken_bytes, "sent_bytes": float(figures.sent_bytes), "step_s": figures.seconds}
