"""Two plans side by side: the settings that differ and the effect of each alone, then what changed, part by part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column

from zerosim.analysis.changes import Alone, Setting, Totals, by_units, pairs, sent, totals
from zerosim.analysis.step_interval import step_interval
from zerosim.config.presets.cluster import Cluster
from zerosim.report import words
from zerosim.report.interval import band, not_ranked, three_figures, trust
from zerosim.report.look import Adaptive, Grid, Stack, prose, right, titled
from zerosim.report.names import counted, kind_words
from zerosim.report.notebook import InNotebook
from zerosim.report.stages import UNUSED
from zerosim.report.time import time_parts
from zerosim.report.verdict import Limit, Planned, verdict
from zerosim.report.warnings import warnings_of, warnings_text
from zerosim.units import few, format_bytes

MOST_ROWS = 12
"""The rows of one table of changes; the rest is one row."""
MOST_SAME = 6
"""The most unchanged values that are named."""


Rows = Mapping[tuple[str, ...], tuple[Any, Any]]
"""Both values, by their names."""


class Side(NamedTuple):
    """One of two plans: its name in the tables, its file, and the memory of its device."""

    name: str
    path: str
    plan: Planned
    limit: Limit | None


class Changes(InNotebook):
    """A and B, their `settings` that differ, and the effect of `each` when A has it alone."""

    def __init__(
        self, a: Side, b: Side, settings: Sequence[Setting], each: Sequence[Alone], cluster: Cluster | None = None
    ) -> None:
        self.a, self.b, self.settings, self.each, self.cluster = a, b, list(settings), list(each), cluster
        self.before, self.after = totals(a.plan.result), totals(b.plan.result)
        held = [_held(side.plan) for side in (a, b)]
        self.by_kind = pairs(*held)
        self.by_unit = pairs(*(by_units(side.plan.fullest.peak) for side in (a, b)))
        self.sent = pairs(*(sent(side.plan.result) for side in (a, b)))
        times = [side.plan.result.time for side in (a, b)]
        self.seconds = {} if None in times else pairs(*(dict(time_parts(time)) for time in times if time is not None))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sides = Stack(prose(self._answer(), "bold"), *map(self._side, (self.a, self.b)), close=True)
        yield Stack(sides, *self._what_changed()) if self.settings else sides

    def _what_changed(self) -> list[RenderableType | None]:
        kinds: Rows = {(kind_words(kind),): both for kind, both in self.by_kind.items()}
        units: Rows = {(unit or "step", kind_words(kind)): both for (unit, kind), both in self.by_unit.items()}
        return [
            self._settings_table(),
            _table("What the peak is made of", ("kind",), kinds),
            _table("The same by unit and kind", ("units", "kind"), units),
            _table("What each GPU sends in a step, on average", ("operation", "axis"), self.sent),
            _table("Where a step's time goes", ("part",), {(k,): v for k, v in self.seconds.items()}, is_time=True),
            prose(self._trust(), "dim") if self.seconds else None,
            warnings_text([f"{side.name}: {text}" for side in (self.a, self.b) for text in self._warnings(side)]),
        ]

    def _answer(self) -> str:
        """Return how many settings differ, and by how much the three figures do."""
        if not self.settings:
            return "No setting differs: both plans are the same."
        said = [setting for setting in self.settings if not setting.follows]
        before, after = self.before, self.after
        moved = [f"peak {_part(before.taken_bytes, after.taken_bytes)}"]
        moved += [f"sent {_part(before.sent_bytes, after.sent_bytes)}"]
        if before.seconds is not None and after.seconds is not None:
            moved.append(f"step {_part(before.seconds, after.seconds, is_time=True)}")
        answer = f"{counted(len(said), 'setting')} differ{'s' * (len(said) == 1)}. From A to B: {', '.join(moved)}."
        tokens = [f"{one.tokens:,}" for one in (self.a.plan.result.config, self.b.plan.result.config)]
        return answer + (f" A step is of {tokens[0]} tokens in A, of {tokens[1]} in B." if len(set(tokens)) > 1 else "")

    def _side(self, side: Side) -> RenderableType:
        config = side.plan.result.config
        of = f" of {side.limit.name}" if side.limit is not None and side.limit.name else ""
        text = f"{side.name}: {side.path}. {words.model_name(config)}, {words.headline(config, of)}."
        if side.limit is None:
            return prose(f"{text} Needs {format_bytes(side.plan.total_bytes(None))} per GPU.")
        return prose(
            f"{text} {verdict(config, side.limit, side.plan.total_bytes(side.limit) - side.limit.reserve(config))}"
        )

    def _settings_table(self) -> RenderableType:
        """Return the table of given settings, beside A's figures with B's value of that one alone."""
        before, moved = self.before, {one.setting.name: one for one in self.each}
        grid = Grid(Column("setting", overflow="fold"), "A", "B", right("peak"), right("sent"), right("step"))
        for setting in self.settings:
            if not setting.follows:
                alone = moved.get(setting.name)
                grid.add(setting.name, _value(setting.a), _value(setting.b), *self._moved(alone and alone.totals))
        grid.rule()
        grid.add("all together", None, None, *self._moved(self.after), style="bold")
        notes = ["Peak, sent, step: the change of A's figures with that one setting of B."]
        notes += [f"{one.setting.name} cannot stand alone: {one.why_not}." for one in self.each if one.why_not]
        if follows := [setting for setting in self.settings if setting.follows]:
            brought = (f"{one.name} {_value(one.a)} → {_value(one.b)}" for one in follows)
            notes.append(f"These follow: {', '.join(brought)}.")
        if before.seconds is None:
            grid = grid.without("step")
        return titled("Settings that differ", Adaptive(grid), "\n".join(notes))

    def _moved(self, after: Totals | None) -> list[str | None]:
        """Return by how much A's figures change."""
        if after is None:
            return [None] * 3
        before = self.before
        figures: list[str | None] = [
            signed_bytes(after.taken_bytes - before.taken_bytes),
            signed_bytes(after.sent_bytes - before.sent_bytes),
        ]
        if before.seconds is None or after.seconds is None:
            return [*figures, None]
        return [*figures, signed_seconds(after.seconds - before.seconds)]

    def _trust(self) -> str:
        """Return how certain the seconds are, and whether they differ for certain."""
        assert self.cluster is not None
        timed = [(side.plan.result.config, side.plan.result.time) for side in (self.a, self.b)]
        known = [(config, time) for config, time in timed if time is not None]
        text = trust(self.cluster, *(step_interval(config, time, self.cluster) for config, time in known))
        if not_ranked([band(config, time, self.cluster) for config, time in known]):
            text += " The ranges of measured steps like these overlap: which of the two is faster is unknown."
        return text

    def _warnings(self, side: Side) -> list[str]:
        taken = side.plan.fullest.reserved_bytes if side.plan.fits(side.limit) else None
        return warnings_of(side.plan.result.config, side.limit, self.cluster, taken)

    def changes(self) -> dict[str, Any]:
        """Return the JSON form of the differing settings, the effect of each alone, and what changed."""
        return {
            "settings": [setting._asdict() for setting in self.settings],
            "alone": [
                {"name": one.setting.name, "error": one.why_not}
                if one.totals is None
                else {"name": one.setting.name, **_totals(one.totals)}
                for one in self.each
            ],
            "totals": {"a": _totals(self.before), "b": _totals(self.after)},
            "peak_by_kind": _rows(("kind",), {(kind,): both for kind, both in self.by_kind.items()}),
            "peak_by_unit": _rows(("units", "kind"), self.by_unit),
            "sent": _rows(("op", "axis"), self.sent),
            "seconds": _rows(("part",), {(part,): both for part, both in self.seconds.items()}),
        }


def _held(plan: Planned) -> dict[str, int]:
    """Return bytes by kind at the peak of the fullest rank; memory that an allocator leaves unused is a kind."""
    unused = plan.fullest.reserved_bytes - plan.fullest.peak.total_bytes
    return {**plan.fullest.peak.by_kind, **({UNUSED: unused} if unused else {})}


def _table(title: str, names: Sequence[str], rows: Rows, *, is_time: bool = False) -> RenderableType | None:
    """Return the table of changes, the largest first, beside both values; unchanged ones are named below. None if it is
    empty."""
    if not rows:
        return None
    changed = {key: both for key, both in rows.items() if both[0] != both[1]}
    same = [" ".join(filter(None, key)) for key in rows if key not in changed]
    shown = dict(list(changed.items())[:MOST_ROWS])
    others = [both for key, both in changed.items() if key not in shown]
    grid = Grid(*(Column(name, overflow="fold") for name in names), right("A"), right("B"), right("change"))
    blank = [""] * (len(names) - 1)
    for key, both in shown.items():
        grid.add(*key, *_cells(both, is_time))
    if others:
        grid.add(f"{len(others)} more", *blank, *_cells(_sum(others), is_time))
    grid.rule()
    grid.add("total", *blank, *_cells(_sum(rows.values()), is_time), style="bold")
    return titled(title, Adaptive(grid), f"Unchanged: {few(same, MOST_SAME)}." if same else "")


def _cells(both: tuple[Any, Any], is_time: bool) -> list[str | None]:
    """Return A, B and the change; a cell is empty if one side lacks the value."""
    plain, signed = (_plain_seconds, signed_seconds) if is_time else (_plain_bytes, signed_bytes)
    return [*(plain(value) if value else None for value in both), signed(both[1] - both[0])]


def _sum(rows: Iterable[tuple[Any, Any]]) -> tuple[Any, Any]:
    columns = list(zip(*rows, strict=True))
    return sum(columns[0]), sum(columns[1])


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return f"{value:,.10g}" if isinstance(value, int | float) else str(value)


def _plain_bytes(value: Any) -> str:
    return format_bytes(round(value))


def _plain_seconds(value: Any) -> str:
    return f"{three_figures(value)} s"


def signed_bytes(change: Any) -> str:
    return f"{'-' if change < 0 else '+'}{_plain_bytes(abs(change))}" if change else "0"


def signed_seconds(change: Any) -> str:
    return f"{'-' if change < 0 else '+'}{_plain_seconds(abs(change))}" if change else "0"


def _part(a: Any, b: Any, *, is_time: bool = False) -> str:
    """Return '45.0 GB → 38.0 GB (-16 %)'."""
    show = _plain_seconds if is_time else _plain_bytes
    if a == b:
        return f"{show(a)} in both"
    percent = float(100 * (b - a) / a) if a else 0.0
    return f"{show(a)} → {show(b)}" + (f" ({percent:+,.{int(abs(percent) < 10)}f} %)" if a else "")


def _totals(figures: Totals) -> dict[str, Any]:
    return {
        "taken_bytes": figures.taken_bytes,
        "sent_bytes": float(figures.sent_bytes),
        "step_s": figures.seconds,
    }


def _rows(names: Sequence[str], rows: Rows) -> list[dict[str, Any]]:
    def number(value: Any) -> Any:
        return value if isinstance(value, int) else float(value)

    return [{**dict(zip(names, key, strict=True)), "a": number(a), "b": number(b)} for key, (a, b) in rows.items()]
