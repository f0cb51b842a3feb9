"""Runs and plans side by side: a column each, rows that are functions of a result, and whether weights are the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.console import Group as Together
from rich.table import Column as GridColumn

from zerosim.config import RunConfig
from zerosim.errors import InputError, OutOfMemory
from zerosim.report import words
from zerosim.report.changes import Changes
from zerosim.report.compare_rows import GROUPS, LAST, LOST, RULED, Column, Group
from zerosim.report.compare_why import CONTRADICTION, IN_RANK_ORDER, SAME, why_apart
from zerosim.report.interval import three_figures
from zerosim.report.look import Adaptive, Grid, Look, Stack, prose, right, titled
from zerosim.report.names import OPTIMIZERS, STAGES, counted, listed
from zerosim.report.notebook import InNotebook
from zerosim.report.plan import BAR
from zerosim.report.tables import kept_text, mesh_text, set_aside_text
from zerosim.report.verdict import assumed, device_text
from zerosim.report.warnings import warnings_text
from zerosim.train.result import RunResult
from zerosim.units import format_bytes

Outcome = Column | RunResult | InputError | OutOfMemory
SAME_SUMS = ("stage", "memory")
"""What changes no sum: weights should be bit-identical."""
WIDTHS = 4, 2
"""Where all columns do not fit beside each other, so many do."""


class Comparison(InNotebook):
    """Results by what differs: `what` is 'stage', 'optimizer' ... A refused or too large one keeps its column.

    `changes`: of two files, the settings that differ. `note`: why nothing was trained, if nobody asked for that.
    """

    def __init__(self, what: str, found: Mapping[Any, Outcome], changes: Changes | None = None, note: str = "") -> None:
        self.what, self.changes, self.note = what, changes, note
        self.outcomes = {str(key): Column(out) if isinstance(out, RunResult) else out for key, out in found.items()}
        self.columns = {name: out for name, out in self.outcomes.items() if isinstance(out, Column)}
        self.failures = {name: out for name, out in self.outcomes.items() if not isinstance(out, Column)}
        self.limit = next((column.limit for column in self.columns.values()), None)
        self.is_pair = len(self.outcomes) == 2 == len(self.columns)
        self.fitting = [name for name, column in self.columns.items() if column.fits]
        self.results = {name: column.result for name, column in self.columns.items() if column.result.losses}
        self.identical = _groups({name: result.weights for name, result in self.results.items()})
        pairs = [(a[0], b[0]) for a, b in combinations(self.identical if what in SAME_SUMS else (), 2)]
        both = {pair: [self.results[name] for name in pair] for pair in pairs}
        self.differences = {pair: largest_difference(a.weights, b.weights) for pair, (a, b) in both.items()}
        stages = {pair: [int(name) for name in pair if what == "stage"] for pair in pairs}
        self.why_apart = {pair: why_apart(a.config, b.config, stages[pair]) for pair, (a, b) in both.items()}
        self.contradictions = [pair for pair, why in self.why_apart.items() if why is None]

    def to_dict(self, values_of: Callable[[Column], Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """Return the JSON form. `values_of` gives a column's own values: by default those of its result."""
        columns: dict[str, Any] = {name: {"error": str(out)} for name, out in self.outcomes.items()}
        for name, column in self.columns.items():
            columns[name] = {**(values_of(column) if values_of else column.result.to_dict()), **column.to_dict()}
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
            Stack(self._answer(), *self._about(), *map(prose, filter(None, [self.note])), close=True),
            self.changes and self.changes.table(),
            self._bars() if is_planned else None,
            *(self._table(group) for group in GROUPS if configs and (self.is_pair or group.key != "units")),
            *((mesh_text(configs[-1]), kept_text(configs[-1])) if configs else ()),
            set_aside_text(*configs),
            *(prose(f"{self._named([name]).capitalize()}: {why}.", "red") for name, why in self.failures.items()),
            *(self._weights() if len(self.results) > 1 and self.what in SAME_SUMS else ()),
            prose(self._assumed(configs), "dim") if is_planned and not self.changes else None,
            warnings_text(self._warnings()),
        )

    def _assumed(self, configs: Sequence[RunConfig]) -> str:
        """Return what a plan assumes, and of which column that is, if the others assume anything else."""
        text = assumed(configs[-1], self.limit)
        if all(assumed(config, self.limit) == text for config in configs):
            return text
        return text.replace("Assumed", f"Assumed for {self._named([list(self.columns)[-1]])}", 1)

    def _named(self, names: Sequence[str]) -> str:
        """Return 'stage 3', 'stages 0, 1 and 2'."""
        several = "memories" if self.what == "memory" else f"{self.what}s"
        return f"{self.what if len(names) == 1 else several} {listed(names)}"

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

    def _about(self) -> Iterator[RenderableType]:
        """Yield what runs: of two files each, otherwise what the columns have in common."""
        configs = {name: column.config for name, column in self.columns.items()}
        runs = {name: _runs(column) for name, column in self.columns.items()}
        if self.changes:
            for path, (name, config) in zip(self.changes.paths, configs.items(), strict=True):
                yield prose(f"{name}: {path}. {words.headline(config)}. {runs[name]}")
        elif configs:
            facts, first = [_facts(config) for config in configs.values()], next(iter(configs.values()))
            each = zip(("stage", "recipe", "precision", "optimizer"), *facts, strict=True)
            said = [own[0] for what, *own in each if len({*own}) == 1 and what != self.what]
            if len({recipe for _, recipe, *_ in facts}) > 1 and self.what != "recipe":
                recipes = [f"{config.parallel.recipe} at {name}" for name, config in configs.items()]
                said.append(f"recipes {listed(recipes)}")
            of = f" of {self.limit.name}" if self.limit is not None and self.limit.name else ""
            of += f": {shape}" if (shape := words.shape(first)) else ""
            head = f"{self._named([*self.outcomes]).capitalize()} on {counted(first.mesh.ranks, 'rank')}{of}"
            yield prose(", ".join([head, *said]), "bold")
            yield prose(next(iter(runs.values())))

    def _bars(self) -> RenderableType:
        """Return what each column takes, with a bar, and how long its step is."""
        grid = Grid(self.what, right("bytes"), GridColumn("bar"), "room", right("step"), right("tokens/s"))
        most = max(column.total_bytes for column in self.columns.values())
        for name, one in self.columns.items():
            cells = [format_bytes(one.total_bytes), "█" * round(BAR * one.total_bytes / most), one.room]
            speed = one.step and [f"{three_figures(one.step['step_s'])} s", three_figures(one.step["tokens_per_s"])]
            grid.add(self._title(name), *cells, *(speed or ("", "")))
        full = grid.filled()
        body = Adaptive(full, full.without("tokens/s"), full.without("tokens/s", "step"))
        return titled("What each GPU takes: the peak, and what is reserved on it", body)

    def _table(self, group: Group) -> RenderableType | None:
        """Return the rows of a group. Two columns have their difference beside them."""
        found: dict[str, Mapping[str, Any]] = {name: group.rows(column) for name, column in self.columns.items()}
        heads = {head: [own.get(head) for own in found.values()] for each in found.values() for head in each}
        rows = sorted((head for head, values in heads.items() if group.shows(head, values)), key=LAST.__contains__)
        found |= {name: {"peak": LOST[type(error)]} for name, error in self.failures.items()}
        every, change = [*self.outcomes], [right("change")] * self.is_pair

        def grid(names: Sequence[str], is_short: bool) -> Grid:
            of = Grid(group.unit or self.what, *map(right, map(self._title, names)), *change)
            for head in rows:
                if head in RULED and head != rows[0]:
                    of.rule()
                cells = [group.cell(found[name].get(head)) for name in names]
                cells += [group.change(*heads[head])] if self.is_pair else []
                of.add(head, *cells, style="cyan" if head in ("formula", "volume") else "")
            return of.short() if is_short else of

        def build(size: int, is_short: bool) -> Callable[[Look], RenderableType]:
            parts = [every[at : at + size] for at in range(0, len(every), size)]
            return lambda look: Together(*(grid(few, is_short)(look) for few in parts))

        exact = [build(len(every), False)] * bool(self.results)
        body = Adaptive(*exact, *(build(size, True) for size in (len(every), *WIDTHS)))
        return titled(group.title, body, group.note([*self.columns.values()])) if rows else None

    def _weights(self) -> Iterator[RenderableType]:
        """Yield which columns trained bit-identical weights, and why others may differ."""
        alike = [group for group in self.identical if len(group) > 1]
        said = [prose(f"Final weights of {self._named(group)}: bit-identical ✓") for group in alike]
        for pair, value in self.differences.items():
            text = f"Final weights of {self._named(pair)}: largest difference {value:.2g}"
            said.append(prose(f"{text} ≠", "bold red") if pair in self.contradictions else prose(text))
        yield Stack(*said, close=True)
        if self.contradictions:
            yield prose(CONTRADICTION)
        elif self.differences:
            yield from map(prose, dict.fromkeys(filter(None, self.why_apart.values())))
        elif next(iter(self.results.values())).config.world.algorithm in IN_RANK_ORDER:
            yield prose(SAME)

    def _warnings(self) -> list[str]:
        """Return each warning once, with its columns if it is not for all."""
        found: dict[str, list[str]] = {}
        for name, column in self.columns.items():
            for text in column.warnings():
                found.setdefault(text, []).append(name)
        return [text if len(of) == len(self.columns) else f"{self._named(of)}: {text}" for text, of in found.items()]


def _facts(config: RunConfig) -> tuple[str, ...]:
    stage, optimizer = STAGES[config.parallel.zero_stage], OPTIMIZERS[config.optim.optimizer]
    return stage, f"recipe {config.parallel.recipe}", config.precision.param_dtype, optimizer


def _runs(column: Column) -> str:
    """Return the model, and what it trains on."""
    config, result = column.config, column.result
    steps = f"trained for {counted(len(result.losses), 'step')} of" if result.losses else "a step is"
    size = f"{words.model_name(config)} of Ψ = {result.num_parameters:,} parameters{words.trained_of(result)}"
    return f"{size}, {steps} {config.global_batch:,} x {config.model.row_tokens:,} tokens."


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
        alike = next((group for group in groups if same_bits(weights[group[0]], own)), [])
        groups += [] if alike else [alike]
        alike.append(name)
    return groups
