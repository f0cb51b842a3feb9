"""Two files: the settings that differ, and the effect of each alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.table import Column

from zerosim.analysis.changes import Setting, Totals
from zerosim.report.interval import three_figures
from zerosim.report.look import Adaptive, Grid, right, titled
from zerosim.report.names import counted
from zerosim.units import format_bytes

FIGURES = "peak", "sent", "step"


class Changes(NamedTuple):
    """The settings that differ from A to B, the totals of both, and A's with `each` setting alone, or why not."""

    settings: Sequence[Setting]
    before: Totals
    after: Totals
    each: Mapping[str, Totals | str]
    paths: Sequence[str]

    def answer(self) -> str:
        """Return how many settings differ, and by how much the three figures do."""
        if not self.settings:
            return "No setting differs: both are the same."
        number, both = sum(not setting.follows for setting in self.settings), zip(self.before, self.after, strict=True)
        moved = [f"{name} {_part(*pair)}" for name, pair in zip(FIGURES, both, strict=True) if None not in pair]
        return f"{counted(number, 'setting')} differ{'s' * (number == 1)}. From A to B: {', '.join(moved)}."

    def table(self) -> RenderableType | None:
        """Return the table of given settings, beside A's figures with B's value of that one alone."""
        if not self.settings:
            return None
        grid = Grid(Column("setting", overflow="fold"), "A", "B", *map(right, FIGURES))
        for setting in self.settings:
            if not setting.follows:
                moved = self._moved(self.each.get(setting.name, ""))
                grid.add(setting.name, _value(setting.a), _value(setting.b), *moved)
        grid.rule()
        grid.add("all together", None, None, *self._moved(self.after), style="bold")
        notes = ["Peak, sent, step: the change of A's figures with that one setting of B."] * bool(self.each)
        notes += [f"{name} cannot stand alone: {why}." for name, why in self.each.items() if isinstance(why, str)]
        brought = [f"{one.name} {_value(one.a)} → {_value(one.b)}" for one in self.settings if one.follows]
        notes += [f"These follow: {', '.join(brought)}."] * bool(brought)
        return titled("Settings that differ", Adaptive(grid.filled()), "\n".join(notes))

    def _moved(self, after: Totals | str) -> list[str | None]:
        """Return by how much A's figures change."""
        both = zip(self.before, [None] * 3 if isinstance(after, str) else after, strict=True)
        return [None if a is None or b is None else signed(b - a) for a, b in both]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        alone = {name: {"error": own} if isinstance(own, str) else own.to_dict() for name, own in self.each.items()}
        totals = {"A": self.before.to_dict(), "B": self.after.to_dict()}
        settings = [setting._asdict() for setting in self.settings]
        return {"files": list(self.paths), "settings": settings, "totals": totals, "alone": alone}


def signed(change: Any) -> str:
    """Return '+353 MB', or of a number of seconds '-0.0064 s'."""
    return f"{'-' if change < 0 else '+'}{_plain(abs(change))}" if change else "0"


def _plain(value: Any) -> str:
    return f"{three_figures(value)} s" if isinstance(value, float) else format_bytes(round(value))


def _part(a: Any, b: Any) -> str:
    """Return '45.0 GB → 38.0 GB (-16 %)'."""
    return f"{_plain(a)} → {_plain(b)}" + (f" ({float(100 * (b - a) / a):+,.3g} %)" if a else "")


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return f"{value:,.10g}" if isinstance(value, int | float) else str(value)
