"""Several stages of one run side by side, and whether they trained the same weights, to the bit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from zerosim.analysis.compare import check_states, last_whole_step
from zerosim.analysis.letters import passes_of, volume_of
from zerosim.analysis.shares import is_mesh, shares_of
from zerosim.analysis.traffic import check_traffic
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import OutOfMemory
from zerosim.ledger.clock import StepTime
from zerosim.report import mesh, mesh_words, words
from zerosim.report.look import Adaptive, Cell, Grid, Look, Stack, prose, right, titled
from zerosim.report.names import STAGES, counted, listed, local
from zerosim.report.notebook import InNotebook
from zerosim.report.tables import mesh_text, set_aside_text
from zerosim.report.time import step_values, times_table
from zerosim.train.result import RunResult

IN_RANK_ORDER = ("direct", "pairs")
"""Algorithms whose sums do not depend on which rank owns a slice."""


class Comparison(InNotebook):
    """Results by stage; an OutOfMemory stands for a stage that did not fit. `times` are modelled, by stage, on a
    `cluster`."""

    def __init__(
        self,
        config: RunConfig,
        outcomes: Mapping[int, RunResult | OutOfMemory],
        times: Mapping[int, StepTime] | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.config, self.times, self.cluster = config, dict(times or {}), cluster
        self.outcomes = dict(outcomes)
        self.results = {stage: out for stage, out in outcomes.items() if isinstance(out, RunResult)}
        self.failures = {stage: out for stage, out in outcomes.items() if isinstance(out, OutOfMemory)}
        self.identical = _groups({stage: result.weights for stage, result in self.results.items()})
        self.differences = {
            (a[0], b[0]): largest_difference(self.results[a[0]].weights, self.results[b[0]].weights)
            for a, b in combinations(self.identical, 2)
        }

    @property
    def contradictions(self) -> list[tuple[int, int]]:
        """Pairs of stages whose weights should be the same to the bit, and are not."""
        if self.config.world.algorithm not in IN_RANK_ORDER:
            return []
        one_batch, alike = self.config.data.accumulate == 1, not self._exchanges_sums
        alike = alike and self.config.mesh.dp_replicate == 1
        # Pairs that add the same numbers in the same order.
        return [
            (a, b) for a, b in self.differences if (one_batch or (a < 2) == (b < 2)) and (alike or (a > 0) == (b > 0))
        ]

    @property
    def _exchanges_sums(self) -> bool:
        """Whether slices add up an optimizer's sums, which stage 0 makes of whole tensors."""
        is_cut = self.config.parallel.partition == "slices" and self.config.mesh.shards > 1
        return is_cut and OPTIMIZERS[self.config.optim.optimizer].cut == "sums"

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: every run's own, or the error in its place."""
        runs = {
            str(stage): out.to_dict() if isinstance(out, RunResult) else {"error": str(out)}
            for stage, out in self.outcomes.items()
        }
        differences = [
            {"stages": list(pair), "max_abs_difference": value if math.isfinite(value) else None}
            for pair, value in self.differences.items()
        ]
        times = {
            str(stage): step_values(self.config.at_stage(stage), time, self.cluster)
            for stage, time in self.times.items()
        }
        return {
            "schema": 2,
            "runs": runs,
            **({} if self.cluster is None else {"time": times}),
            "weights": {"bit_identical": self.identical, "differences": differences},
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ranks = counted(self.config.mesh.ranks, "rank")
        ranks += f": {mesh_words.shape(self.config)}" if is_mesh(self.config) else ""
        yield Stack(
            prose(f"Stages {', '.join(map(str, self.outcomes))} on {ranks}", "bold"),
            prose(words.trained(next(iter(self.results.values())))) if self.results else None,
            mesh_text(self.config.at_stage(max(self.outcomes))),
            set_aside_text(*map(self.config.at_stage, self.outcomes)),
            self._table() if self.results else None,
            times_table(self.times, self.cluster),
            *(
                prose(f"Stage {stage}: {'; '.join(filter(None, (str(error), error.advice)))}.", "red")
                for stage, error in self.failures.items()
            ),
            self._weights() if len(self.results) > 1 else None,
        )

    def _table(self) -> RenderableType:
        stages = [right(f"{stage}\n{STAGES[stage]}") for stage in self.outcomes]
        grid = Grid("stage", *stages)
        rows = _ROWS if is_mesh(self.config) else [name for name in _ROWS if name != "exchanged"]
        for name, *cells in zip(rows, *(_column(outcome, rows) for outcome in self.outcomes.values()), strict=True):
            if name in ("peak", "last loss"):
                grid.rule()
            grid.add(name, *cells, style="cyan" if name in ("formula", "volume") else "")
        note = "Memory is that of the rank with the most of it, padding included; sent is the mean over ranks."
        if is_mesh(self.config):
            note += " Ψ_r are the parameters on a rank; exchanged is what tp and pp send of activations."
        if any(outcome.is_modelled for outcome in self.results.values()):
            note += " Native collectives do not tell what they send: sent is what a ring would, modelled."
        title = "Bytes per rank: model states when backward ends, the peak, and what one step sends"
        return titled(title, Adaptive(grid, grid.short()), note)

    def _weights(self) -> RenderableType:
        def build(look: Look) -> RenderableType:
            lines = [
                Text.assemble(f"Final weights of stages {listed(group)}: bit-identical ", look.mark(True))
                for group in self.identical
                if len(group) > 1
            ]
            for pair, value in self.differences.items():
                line = Text(f"Final weights of stages {listed(pair)}: largest difference {value:.2g} ")
                lines.append(line.append_text(look.mark(False)) if pair in self.contradictions else line)
            return Text("\n").join(lines)

        why = self._why()
        return Stack(Adaptive(build), None if why is None else prose(why))

    def _why(self) -> str | None:
        """Why weights differ, or why they do not."""
        if self.contradictions:
            return "They should be the same to the bit. Please report this as a bug, with the command line."
        if not self.differences:
            return (
                "The stages add the same numbers in the same order, whoever owns a slice: ZeRO changes where things "
                "are, not what is computed."
                if self.config.world.algorithm in IN_RANK_ORDER
                else None
            )
        if self.config.world.algorithm == "ring":
            return (
                "A ring rounds at every hop and begins each chunk's sum at another rank, so that bits depend on who "
                "owns what. With --collective direct they do not."
            )
        if self.config.mesh.dp_replicate > 1 and self.config.data.accumulate == 1:
            return (
                "Stage 0 adds over all ranks at once, the others within a replica and then over replicas: the same "
                "numbers in another order, rounded differently."
            )
        if self._exchanges_sums and self.config.data.accumulate == 1:
            title = OPTIMIZERS[self.config.optim.optimizer].title
            return (
                f"{title} adds up squares over rows, columns and tensors: stage 0 over whole ones, the others over "
                "slices and then over ranks, rounded differently."
            )
        alike = self.config.mesh.dp_replicate == 1 and not self._exchanges_sums
        agree = "all stages agree" if alike else "stages 1, 2 and 3 agree"
        return (
            "Stages 2 and 3 add a gradient over ranks first and then over micro-batches, stages 0 and 1 the other way "
            f"round: the same numbers in another order, rounded differently. With --accumulate 1 {agree}."
        )


_ROWS = (
    "param",
    "grad",
    "optim",
    "states",
    "formula",
    "agrees",
    "peak",
    "sent",
    "volume",
    "exchanged",
    "agrees",
    "last loss",
)


def _column(outcome: RunResult | OutOfMemory, rows: Sequence[str]) -> list[Cell]:
    """One stage's cells, in the order of `rows`, which are _ROWS or those of one axis."""
    if isinstance(outcome, OutOfMemory):
        return [Text("no memory", style="bold red") if name == "peak" else None for name in rows]
    on_mesh, step = is_mesh(outcome.config), last_whole_step(outcome)
    stages = [check_states(outcome, share.stage) for share in shares_of(outcome)]
    sent: list[Cell] = [None] * (4 if on_mesh else 3)
    if step is not None:
        volume = str(volume_of(outcome, passes=passes_of(outcome, step)))
        states, exchanged, agrees = mesh.mean_sent(outcome, step)
        moved: list[Cell] = [local(volume), round(exchanged)] if on_mesh else [check_traffic(outcome, step)[-1].text]
        sent = [round(states), *moved, None if outcome.is_modelled else agrees]
    formula = stages[0][-1].text
    return [
        *(max(max(checks[kind].counted) for checks in stages) for kind in range(len(stages[0]))),
        local(formula) if on_mesh else formula,
        all(check.agrees for checks in stages for check in checks),
        max(memory.peak.total_bytes for memory in outcome.memory),
        *sent,
        f"{outcome.mean_losses[-1]:.4f}",
    ]


def same_bits(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two sets of weights are the same, to the bit (0 and -0 differ, nan and nan need not)."""

    def bits(array: Any) -> Any:
        return np.ascontiguousarray(array).view(np.uint8)

    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and np.array_equal(bits(a[name]), bits(b[name])) for name in a
    )


def largest_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Over all weights; nan where one holds nan."""
    with np.errstate(invalid="ignore"):
        return max(float(np.max(np.abs(a[name].astype(np.float64) - b[name].astype(np.float64)))) for name in a)


def _groups(weights: Mapping[int, Mapping[str, Any]]) -> list[list[int]]:
    """The stages, those with the same weights together."""
    groups: list[list[int]] = []
    for stage, own in weights.items():
        for group in groups:
            if same_bits(weights[group[0]], own):
                group.append(stage)
                break
        else:
            groups.append([stage])
    return groups
