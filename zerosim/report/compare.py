"""Runs and plans side by side: a column each, rows that are functions of a result, and whether weights are the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.console import Group as Together
from rich.table import Column as GridColumn
from rich.text import Text

from zerosim.analysis.changes import pairs
from zerosim.errors import InputError, OutOfMemory
from zerosim.report import words
from zerosim.report.changes import Changes
from zerosim.report.compare_rows import GROUPS, IF_DIFFERENT, LAST, RULED, Column, Group, Values
from zerosim.report.compare_why import CONTRADICTION, IN_RANK_ORDER, SAME, why_apart
from zerosim.report.interval import three_figures
from zerosim.report.look import Adaptive, Grid, Look, Stack, prose, right, titled
from zerosim.report.names import OPTIMIZERS, STAGES, counted, listed
from zerosim.report.notebook import InNotebook
from zerosim.report.plan import BAR
from zerosim.report.tables import kept_text, mesh_text, set_aside_text
from zerosim.report.verdict import assumed, device_text, verdict
from zerosim.report.warnings import warnings_text
from zerosim.train.result import RunResult
from zerosim.units import format_bytes

PLURALS = MappingProxyType(
    {name: f"{name}s" for name in ("stage", "recipe", "optimizer", "precision", "compression", "file")}
    | {"memory": "memories"}
)
"""What columns may differ in."""
SAME_SUMS = ("stage", "memory")
"""What changes no sum: weights should be bit-identical."""
MOST_ROWS = 12
"""The rows of the table by unit; the rest is one row."""
WIDTHS = 4, 2
"""Where all columns do not fit beside each other, so many do."""
LOST: Mapping[type[Exception], Text] = {
    OutOfMemory: Text("no memory", style="bold red"),
    InputError: Text("refused", style="bold red"),
}


class Comparison(InNotebook):
    """Results by what differs: `what` is 'stage', 'optimizer' ... A refused or too large one keeps its column.

    `changes`: of two files, the settings that differ. `note`: why nothing was trained, if nobody asked for that.
    """

    def __init__(
        self,
        what: str,
        outcomes: Mapping[Any, Column | RunResult | InputError | OutOfMemory],
        changes: Changes | None = None,
        note: str = "",
    ) -> None:
        self.what, self.changes, self.note = what, changes, note
        self.outcomes = {
            str(name): Column(out) if isinstance(out, RunResult) else out for name, out in outcomes.items()
        }
        self.columns = {name: out for name, out in self.outcomes.items() if isinstance(out, Column)}
        self.failures = {name: out for name, out in self.outcomes.items() if not isinstance(out, Column)}
        self.limit = next((column.limit for column in self.columns.values()), None)
        self.fitting = [name for name, column in self.columns.items() if column.fits]
        self.results = {name: column.result for name, column in self.columns.items() if column.result.losses}
        self.identical = _groups({name: result.weights for name, result in self.results.items()})
        self.differences = {
            (a[0], b[0]): largest_difference(self.results[a[0]].weights, self.results[b[0]].weights)
            for a, b in combinations(self.identical if what in SAME_SUMS else (), 2)
        }
        self.why_apart = {
            (a, b): why_apart(self.results[a].config, self.results[b].config) for a, b in self.differences
        }

    @property
    def contradictions(self) -> list[tuple[str, str]]:
        """Pairs of columns whose weights should be bit-identical, and are not."""
        return [pair for pair, why in self.why_apart.items() if why is None]

    def to_dict(self, values_of: Callable[[Column], Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """Return the JSON form. `values_of` gives a column's own values: by default those of its result."""
        columns = {
            name: {**(values_of(out) if values_of else out.result.to_dict()), **out.to_dict()}
            if isinstance(out, Column)
            else {"error": str(out)}
            for name, out in self.outcomes.items()
        }
        differences = [
            {"columns": list(pair), "max_abs_difference": value if math.isfinite(value) else None}
            for pair, value in self.differences.items()
        ]
        weights = {"bit_identical": self.identical, "differences": differences} if self.results else None
        changes = self.changes and self.changes.to_dict()
        return {"schema": 3, "what": self.what, "columns": columns, "weights": weights, "changes": changes}

    # -- the page -------------------------------------------------------------------------------------
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        configs = [column.config for column in self.columns.values()]
        is_planned = bool(configs) and not self.results
        yield Stack(
            Stack(self._answer(), *self._about(), prose(self.note) if self.note else None, close=True),
            self.changes and self.changes.table(),
            self._bars() if is_planned and not self.changes else None,
            *(self._table(group) for group in GROUPS if configs),
            *((mesh_text(configs[-1]), kept_text(configs[-1])) if configs else ()),
            set_aside_text(*configs),
            *(
                prose(f"{self._named([name]).capitalize()}: {error_words(error)}.", "red")
                for name, error in self.failures.items()
            ),
            self._weights() if len(self.results) > 1 and self.what in SAME_SUMS else None,
            prose(assumed(configs[-1], self.limit).replace(f", recipe {configs[-1].parallel.recipe}", ""), "dim")
            if is_planned and not self.changes
            else None,
            warnings_text(self._warnings()),
        )

    def _named(self, names: Sequence[str]) -> str:
        """Return 'stage 3', 'stages 0, 1 and 2'."""
        return f"{self.what if len(names) == 1 else PLURALS[self.what]} {listed(names)}"

    def _title(self, name: str) -> str:
        return STAGES[int(name)] if self.what == "stage" else OPTIMIZERS.get(name, name)

    def _answer(self) -> RenderableType | None:
        """Return what changed between two files, else which columns fit on the device."""
        if self.changes or self.limit is None:
            return prose(self.changes.answer(), "bold") if self.changes else None
        where, rest = f"on {device_text(self.limit)}", [name for name in self.columns if name not in self.fitting]
        if not self.fitting:
            least = min(self.columns, key=lambda name: self.columns[name].total_bytes)
            needs = f"{self._title(least)} takes the least: {self.columns[least].room}."
            return prose(f"No {self.what} fits {where}. {needs}", "bold red")
        text = f"{self._named(self.fitting).capitalize()} fit{'s' * (len(self.fitting) == 1)} {where}"
        others = f", {self._named(rest)} do{'es' * (len(rest) == 1)} not" if rest else ""
        return prose(f"{text}{others}.", "bold green")

    def _about(self) -> list[RenderableType]:
        """Return what the columns have in common: ranks, device, mesh, recipe, model and batch."""
        if not self.columns or self.changes:
            return [
                self._side(name, path)
                for name, path in zip(self.columns, self.changes.paths if self.changes else [], strict=True)
            ]
        result = next(iter(self.columns.values())).result
        config, of = result.config, f" of {self.limit.name}" if self.limit is not None and self.limit.name else ""
        recipes = {name: column.config.parallel.recipe for name, column in self.columns.items()}
        several = f"recipes {listed([f'{own} at {name}' for name, own in recipes.items()])}"
        said = {
            "stage": STAGES[config.parallel.zero_stage],
            "recipe": f"recipe {config.parallel.recipe}" if len(set(recipes.values())) == 1 else several,
            "precision": config.precision.param_dtype,
            "optimizer": OPTIMIZERS[config.optim.optimizer],
        }
        shared = ", ".join(text for key, text in said.items() if key != self.what)
        mesh = f": {shape}" if (shape := words.shape(config)) else ""
        head = f"{self._named([*self.outcomes]).capitalize()} on {counted(config.mesh.ranks, 'rank')}{of}{mesh}"
        size = f"{words.model_name(config)} of Ψ = {result.num_parameters:,} parameters{words.trained_of(result)}"
        steps = f"trained for {counted(len(result.losses), 'step')} of" if self.results else "a step is"
        batch = f"{config.global_batch:,} x {config.model.row_tokens:,} tokens"
        return [prose(f"{head}, {shared}", "bold"), prose(f"{size}, {steps} {batch}.")]

    def _side(self, name: str, path: str) -> RenderableType:
        """Return a file, what it runs, and whether that fits."""
        column, config, limit = self.columns[name], self.columns[name].config, self.columns[name].limit
        needs = f"Needs {format_bytes(column.total_bytes)} per GPU."
        if limit is not None:
            needs = verdict(config, limit, column.total_bytes - column.reserve)
        of = f" of {limit.name}" if limit is not None and limit.name else ""
        about = f"{words.model_name(config)}, {words.headline(config, of)}, {config.tokens:,} tokens a step"
        return prose(f"{name}: {path}. {about}. {needs}")

    def _bars(self) -> RenderableType:
        """Return what each column takes, with a bar, and how long its step is."""
        grid = Grid(self.what, right("bytes"), GridColumn("bar"), "room", right("step"), right("tokens/s"))
        most = max(column.total_bytes for column in self.columns.values())
        for name, one in self.columns.items():
            cells = [format_bytes(one.total_bytes), "█" * round(BAR * one.total_bytes / most), one.room]
            speed = one.step and [f"{three_figures(one.step['step_s'])} s", three_figures(one.step["tokens_per_s"])]
            grid.add(self._title(name), *cells, *(speed or ("", "")))
        has_reserve = any(column.reserve for column in self.columns.values())
        title = "What each GPU takes: the peak" + " and what is reserved" * has_reserve
        grid = grid.filled()
        return titled(title, Adaptive(grid, grid.without("tokens/s"), grid.without("tokens/s", "step")))

    def _table(self, group: Group) -> RenderableType | None:
        """Return the rows of a group. Two columns have their difference beside them."""
        found = {name: group.rows(column) for name, column in self.columns.items()}
        names, is_pair = [*self.outcomes], len(self.outcomes) == 2 == len(self.columns)
        if group.key == "units":
            found = _largest(found) if is_pair else {}
        heads = {head: {own.get(head) for own in found.values()} for every in found.values() for head in every}
        rows = [head for head in heads if heads[head] != {None} and (head not in IF_DIFFERENT or len(heads[head]) > 1)]
        rows.sort(key=lambda head: head in LAST)
        lost = {name: {"peak": LOST[type(error)]} for name, error in self.failures.items()}

        def grid(names: Sequence[str], is_short: bool) -> Grid:
            titles = [f"{name}\n{STAGES[int(name)]}" if self.what == "stage" else self._title(name) for name in names]
            of = Grid(group.unit or self.what, *map(right, titles), *[right("change")] * is_pair)
            for head in rows:
                if head in RULED and head != rows[0]:
                    of.rule()
                values = [{**found, **lost}[name].get(head) for name in names]
                change = [group.change(*(own.get(head) for own in found.values()))] if is_pair else []
                style = "cyan" if head in ("formula", "volume") else ""
                of.add(head, *map(group.cell, values), *change, style=style)
            return of.short() if is_short else of

        def build(size: int, is_short: bool) -> Callable[[Look], RenderableType]:
            parts = [names[at : at + size] for at in range(0, len(names), size)]
            return lambda look: Together(
                *(part for few in parts for part in (grid(few, is_short)(look), "")[: len(parts)])
            )

        exact = [build(len(names), False)] * bool(self.results)
        body = Adaptive(*exact, *(build(size, True) for size in (len(names), *WIDTHS)))
        return titled(group.title, body, group.note([*self.columns.values()])) if rows else None

    def _weights(self) -> RenderableType:
        """Return which columns trained bit-identical weights, and why others may differ."""

        def build(look: Look) -> RenderableType:
            said: dict[str, bool | None] = {
                f"{listed(group)}: bit-identical ": True for group in self.identical if len(group) > 1
            }
            for pair, value in self.differences.items():
                said[f"{listed(pair)}: largest difference {value:.2g} "] = (
                    False if pair in self.contradictions else None
                )
            marks = {text: look.mark(good) if good is not None else "" for text, good in said.items()}
            return Text("\n").join(
                Text.assemble(f"Final weights of {PLURALS[self.what]} {text}", marks[text]) for text in said
            )

        config = next(iter(self.results.values())).config
        why = list(dict.fromkeys(filter(None, self.why_apart.values())))
        if not self.differences and config.world.algorithm in IN_RANK_ORDER:
            why = [SAME]
        return Stack(Adaptive(build), *map(prose, [CONTRADICTION] if self.contradictions else why))

    def _warnings(self) -> list[str]:
        """Return each warning once, with its columns if it is not for all."""
        found: dict[str, list[str]] = {}
        for name, column in self.columns.items():
            if name not in self.results:
                for text in column.warnings():
                    found.setdefault(text, []).append(name)
        return [text if len(of) == len(self.columns) else f"{self._named(of)}: {text}" for text, of in found.items()]


def error_words(error: Exception) -> str:
    """Return an error's message, with the advice for a run that is out of memory."""
    return "; ".join(filter(None, (str(error), getattr(error, "advice", None))))


def _largest(found: Mapping[str, Values]) -> dict[str, Values]:
    """Return the rows of two columns that differ, the largest difference first; the smallest are one row."""
    both = pairs(*found.values())
    moved = [head for head, (a, b) in both.items() if a != b]
    sums = [sum(both[head][side] for head in moved[MOST_ROWS:]) for side in (0, 1)]
    more = {f"{len(moved) - MOST_ROWS} more": sums} if len(moved) > MOST_ROWS else {}
    rows = {**{head: both[head] for head in moved[:MOST_ROWS]}, **more}
    return {name: {head: pair[side] or None for head, pair in rows.items()} for side, name in enumerate(found)}


# -- weights ------------------------------------------------------------------------------------
def same_bits(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two sets of weights are bit-identical (0 and -0 differ, nan and nan may be equal)."""

    def bits(array: Any) -> Any:
        return np.ascontiguousarray(array).view(np.uint8)

    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and np.array_equal(bits(a[name]), bits(b[name])) for name in a
    )


def largest_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Return the largest difference over all weights; nan if one is nan."""
    with np.errstate(invalid="ignore"):
        return max(float(np.max(np.abs(a[name].astype(np.float64) - b[name].astype(np.float64)))) for name in a)


def _groups(weights: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return the columns, those with the same weights together."""
    groups: list[list[str]] = []
    for name, own in weights.items():
        alike = next((group for group in groups if same_bits(weights[group[0]], own)), None)
        if alike is None:
            groups.append([name])
        else:
            alike.append(name)
    return groups
