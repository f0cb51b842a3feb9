"""Several runs on the same batches side by side: ZeRO stages, and whether they trained bit-identical weights;
optimizers and number formats, with bytes per parameter and loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from zerosim.analysis.capabilities.delayed import lags
from zerosim.analysis.checks import Checks, agree, checks, formulas_agree
from zerosim.analysis.per_parameter import bytes_per_parameter
from zerosim.config import RunConfig
from zerosim.config.parts.parallel import is_sliced
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.optimizers import OPTIMIZERS as PRESETS
from zerosim.errors import OutOfMemory
from zerosim.ledger.clock import StepTime
from zerosim.report import words
from zerosim.report.look import Adaptive, Cell, Grid, Look, Stack, prose, right, titled
from zerosim.report.names import OPTIMIZERS, STAGES, counted, listed
from zerosim.report.notebook import InNotebook
from zerosim.report.tables import mesh_text, set_aside_text
from zerosim.report.time import step_values, times_table
from zerosim.train.result import RunResult

IN_RANK_ORDER = ("direct", "pairs")
"""Algorithms whose sums do not depend on which rank owns a slice."""
Name = TypeVar("Name")


class Outcomes(InNotebook, Generic[Name]):
    """Results by what differs between the runs; an OutOfMemory stands for a run that did not fit."""

    def __init__(self, config: RunConfig, outcomes: Mapping[Name, RunResult | OutOfMemory]) -> None:
        self.config, self.outcomes = config, dict(outcomes)
        self.results = {name: out for name, out in outcomes.items() if isinstance(out, RunResult)}
        self.failures = {name: out for name, out in outcomes.items() if isinstance(out, OutOfMemory)}

    def runs(self) -> dict[str, Any]:
        """Return the JSON form of every run, or the error in its place."""
        return {
            str(name): out.to_dict() if isinstance(out, RunResult) else {"error": str(out)}
            for name, out in self.outcomes.items()
        }

    def refused(self, what: str) -> list[RenderableType]:
        """Return each run that did not fit, with its request."""
        errors = {name: "; ".join(filter(None, (str(error), error.advice))) for name, error in self.failures.items()}
        return [prose(f"{what} {name}: {text}.", "red") for name, text in errors.items()]


class Comparison(Outcomes[int]):
    """Results by ZeRO stage. `times` are modelled, by stage, on a `cluster`."""

    def __init__(
        self,
        config: RunConfig,
        outcomes: Mapping[int, RunResult | OutOfMemory],
        times: Mapping[int, StepTime] | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        super().__init__(config, outcomes)
        self.times, self.cluster = dict(times or {}), cluster
        self.checks = {stage: checks(result) for stage, result in self.results.items()}
        self.identical = _groups({stage: result.weights for stage, result in self.results.items()})
        self.differences = {
            (a[0], b[0]): largest_difference(self.results[a[0]].weights, self.results[b[0]].weights)
            for a, b in combinations(self.identical, 2)
        }

    @property
    def contradictions(self) -> list[tuple[int, int]]:
        """Pairs of ZeRO stages whose weights should be bit-identical, and are not."""
        if self.config.world.algorithm not in IN_RANK_ORDER:
            return []
        one_batch, alike = self.config.data.accumulate == 1, self._adds_alike and not self._is_late
        # Pairs that add the same numbers in the same order.
        return [
            (a, b) for a, b in self.differences if (one_batch or (a < 2) == (b < 2)) and (alike or (a > 0) == (b > 0))
        ]

    @property
    def _adds_alike(self) -> bool:
        """Whether stage 0 adds in the others' order: there are no replicas, and no optimizer sums over slices."""
        some = any(is_sliced(result.config.parallel) for result in self.results.values())
        has_sums = some and self.config.mesh.shards > 1 and PRESETS[self.config.optim.optimizer].cut == "sums"
        return self.config.mesh.dp_replicate == 1 and not has_sums

    @property
    def _is_late(self) -> bool:
        """Whether an update was delayed, which stage 0 cannot do."""
        return any(lags(result.config) for result in self.results.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: every run's own, or the error in its place."""
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
            "runs": self.runs(),
            "formulas": {
                str(stage): {
                    "agree": formulas_agree(found),
                    "checks": [[check.to_dict() for check in (*one.of_memory, *one.of_step)] for one in found],
                }
                for stage, found in self.checks.items()
            },
            **({} if self.cluster is None else {"time": times}),
            "weights": {"bit_identical": self.identical, "differences": differences},
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        stages, ranks = ", ".join(map(str, self.outcomes)), counted(self.config.mesh.ranks, "rank")
        of_mesh = f": {shape}" if (shape := words.shape(self.config)) else ""
        recipes = "/".join(dict.fromkeys(self.config.at_stage(stage).parallel.recipe for stage in self.outcomes))
        yield Stack(
            prose(f"Stages {stages} on {ranks}{of_mesh}, recipe {recipes}", "bold"),
            prose(words.trained(next(iter(self.results.values())))) if self.results else None,
            mesh_text(self.config.at_stage(max(self.outcomes))),
            set_aside_text(*map(self.config.at_stage, self.outcomes)),
            self._table() if self.results else None,
            times_table(self.config, self.times, self.cluster),
            *self.refused("Stage"),
            self._weights() if len(self.results) > 1 else None,
        )

    def _table(self) -> RenderableType:
        grid = Grid("stage", *(right(f"{stage}\n{STAGES[stage]}") for stage in self.outcomes))
        columns = {stage: _figures(found) for stage, found in self.checks.items()}
        lost = {"peak": Text("no memory", style="bold red")}
        for at, (name, _) in enumerate(next(iter(columns.values()))):
            cells = [columns[stage][at][1] if stage in columns else lost.get(name) for stage in self.outcomes]
            if name in ("peak", "last loss"):
                grid.rule()
            if name != "exchanged" or any(cells):
                grid.add(name, *cells, style="cyan" if name in ("formula", "volume") else "")
        note = "Memory: of the rank with the most, padding included. Sent: the mean over ranks."
        if any(map(words.holds_part, self.checks.values())):
            apart = any("N_e" in one.of.held for found in self.checks.values() for one in found)
            of, but = ("Ψ_d", " without its experts' Ψ_e") if apart else ("Ψ_r", "")
            note += f" {of} are the parameters on a rank{but}."
        if any(one.exchanged for found in self.checks.values() for one in found):
            note += " Exchanged: activations that tp, cp, ep and pp send."
        if any(outcome.is_modelled for outcome in self.results.values()):
            note += " The bytes of native collectives are not visible: a ring's bytes are modelled in their place."
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
        """Return why weights differ, or why they do not."""
        algorithm, one_batch = self.config.world.algorithm, self.config.data.accumulate == 1
        if self.contradictions:
            return "They should be bit-identical. Please report this as a bug, with the command line."
        if not self.differences and algorithm not in IN_RANK_ORDER:
            return None
        if not self.differences:
            return (
                "The stages add the same numbers in the same order, whichever rank owns a slice: ZeRO changes where "
                "states are, not what is computed."
            )
        if algorithm == "ring":
            return (
                "A ring rounds at every hop and begins each chunk's sum at another rank, so that bits depend on who "
                "owns what. With --collective direct they do not."
            )
        if self._is_late:
            return (
                "With --delayed-update stages 1, 2 and 3 run on weights that are late by one update. Stage 0 offloads "
                "nothing, and is never late."
            )
        remedy = ""
        if one_batch and self.config.mesh.dp_replicate > 1:
            how = "Stage 0 adds over all ranks at once, the others within a replica and then over replicas"
        elif one_batch and not self._adds_alike:
            name = OPTIMIZERS[self.config.optim.optimizer]
            how = (
                f"{name} adds up squares over rows, columns and tensors: stage 0 over whole ones, the others over "
                "slices and then over ranks"
            )
        else:
            how = (
                "Stages 2 and 3 add a gradient over ranks first and then over microbatches, stages 0 and 1 the other "
                "way round"
            )
            remedy = f" With --accumulate 1 {'all stages' if self._adds_alike else 'stages 1, 2 and 3'} agree."
        return f"{how}: the same numbers are added in another order, and rounded differently.{remedy}"


def _figures(found: Sequence[Checks]) -> list[tuple[str, Cell]]:
    """Return a row of the table for each ZeRO stage: headings and cells. Sent bytes are those of the last whole
    step."""
    result, own, sent = found[0].of.result, words.of_rank(found), list[Cell]([None] * 4)
    if found[0].of.step is not None:
        exchanges = chain(*(one.exchanged for one in found))
        means = (sum(check.mean for check in of) for of in ([one.sent[-1] for one in found], exchanges))
        agrees = None if result.is_modelled else agree(chain(*(one.of_step for one in found)))
        of_states, of_activations = (round(mean / len(found)) for mean in means)
        sent = [of_states, own(found[0].sent[-1].text), of_activations, agrees]
    states = zip(*(one.states for one in found), strict=True)
    held = [max(max(check.counted) for check in of_kind) for of_kind in states]
    return [
        *zip(("param", "grad", "optim", "states"), held, strict=True),
        ("formula", own(found[0].states[-1].text)),
        ("agrees", agree(chain(*(one.of_memory for one in found)))),
        ("peak", max(memory.peak.total_bytes for memory in result.memory)),
        *zip(("sent", "volume", "exchanged", "agrees"), sent, strict=True),
        ("last loss", f"{result.mean_losses[-1]:.4f}"),
    ]


# -- optimizers and number formats ---------------------------------------------------------------
class OptimizerComparison(Outcomes[str]):
    """Results by optimizer: counted bytes per parameter, and loss."""

    what = "optimizer"
    own = "lr"
    about_own = "The learning rate is each optimizer's own; --lr sets one for all."

    def own_figure(self, result: RunResult) -> str:
        """Return the optimizer's own figure, in column `own`."""
        return f"{result.config.optim.lr:g}"

    def format_of(self, config: RunConfig) -> str:
        """Return the configuration that all runs share."""
        return f"in {config.precision.param_dtype}"

    def __init__(self, config: RunConfig, outcomes: Mapping[str, RunResult | OutOfMemory]) -> None:
        super().__init__(config, outcomes)
        self.costs = {name: bytes_per_parameter(result) for name, result in self.results.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: every run's own with its bytes per parameter, or the error in its place."""
        runs = self.runs()
        for name, costs in self.costs.items():
            runs[name]["bytes_per_parameter"] = {kind: float(cost) for kind, cost in costs.items()}
        return {"schema": 1, "runs": runs}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        stage, results = STAGES[self.config.parallel.zero_stage], list(self.results.values())
        yield Stack(
            prose(f"{counted(len(self.outcomes), self.what)} under {stage}, on the same batches", "bold"),
            prose(self._trained(results[0])) if results else None,
            set_aside_text(*(result.config for result in results)),
            self._table() if results else None,
            *self.refused(self.what.capitalize()),
        )

    def _trained(self, result: RunResult) -> str:
        config = result.config
        return (
            f"Ψ = {result.num_parameters:,} parameters on {counted(config.mesh.ranks, 'rank')} "
            f"{self.format_of(config)}; {counted(len(result.steps), 'step')} of {config.global_batch} x "
            f"{config.model.seq} tokens."
        )

    def _table(self) -> RenderableType:
        figures = (self.own, "K", "all states", "peak, bytes", "first loss", "last loss")
        grid = Grid(self.what, "states", *(right(name) for name in figures))
        for name, result in self.results.items():
            states = sorted({state for memory in result.memory for state in memory.states})
            grid.add(
                OPTIMIZERS.get(name, name),
                ", ".join(states) or "none",
                self.own_figure(result),
                *(f"{float(self.costs[name][kind]):.5g}" for kind in ("optim", "total")),
                f"{max(memory.peak.total_bytes for memory in result.memory):,}",
                *(f"{loss:.4f}" for loss in (result.mean_losses[0], result.mean_losses[-1])),
            )
        note = (
            f"K and all states: bytes per parameter when backward ends, as counted, padding left out. {self.about_own}"
        )
        return titled(f"What each {self.what} keeps, and how far it comes", Adaptive(grid, grid.short()), note)


class PrecisionComparison(OptimizerComparison):
    """Results by precision; for bf16-pure a rounding follows after a colon."""

    what = "precision"
    own = "stayed"
    about_own = (
        "Stayed: the average share of weights that a step did not change although their update was nonzero. "
        "Rounding to the nearest loses such an update, stochastic rounding is right on average, and Kahan's "
        "compensation keeps it."
    )

    def own_figure(self, result: RunResult) -> str:
        lost = result.lost_updates
        return f"{100 * float(sum(lost)) / len(lost):.3g} %" if lost else "-"

    def format_of(self, config: RunConfig) -> str:
        return f"with {OPTIMIZERS[config.optim.optimizer]}, learning rate {config.optim.lr:g}"


LINKS: Mapping[str, float] = MappingProxyType({"1 Gb/s": 0.12e9, "400 Gb/s": 48e9})
"""A slow link between nodes and a fast one, in bytes per second as NCCL counts them."""


class CompressionComparison(OptimizerComparison):
    """Results by compression: bytes sent and stored, and the loss. `times`: a step over each of `LINKS`."""

    what = "compression"

    def __init__(
        self,
        config: RunConfig,
        outcomes: Mapping[str, RunResult | OutOfMemory],
        times: Mapping[str, Sequence[StepTime | None]],
    ) -> None:
        super().__init__(config, outcomes)
        self.times = {name: [None if one is None else one.seconds for one in each] for name, each in times.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: every run's own, with the seconds of a step over each link."""
        values = super().to_dict()
        for name, seconds in self.times.items():
            values["runs"][name]["step_s_over"] = dict(zip(LINKS, seconds, strict=True))
        return values

    def format_of(self, config: RunConfig) -> str:
        return f"with {OPTIMIZERS[config.optim.optimizer]}, learning rate {config.optim.lr:g}"

    def _table(self) -> RenderableType:
        links = [f"step, {name}" for name in LINKS]
        grid = Grid("gradients", *(right(name) for name in ("sent, bytes", "states, bytes", "last loss", *links)))
        for name, result in self.results.items():
            sent = max(result.sent_bytes(rank, len(result.steps) - 1) for rank in result.ran)
            states = max(memory.marks["end_of_backward"].by_kind.get("optim", 0) for memory in result.memory)
            seconds = [f"{1000 * one:.3g} ms" if one is not None else "-" for one in self.times.get(name, [None] * 2)]
            grid.add(name, f"{sent:,}", f"{states:,}", f"{result.mean_losses[-1]:.4f}", *seconds)
        note = "Sent: for model states in the last step, by the rank that sends most. States: what a rank keeps of the "
        note += "optimizer's and of what was not sent. Steps are modelled for nodes of one A100 each."
        return titled("What compression saves and costs", Adaptive(grid, grid.short()), note)


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


def _groups(weights: Mapping[int, Mapping[str, Any]]) -> list[list[int]]:
    """Return the ZeRO stages, those with the same weights together."""
    groups: list[list[int]] = []
    for stage, own in weights.items():
        alike = next((group for group in groups if same_bits(weights[group[0]], own)), None)
        if alike is None:
            groups.append([stage])
        else:
            alike.append(stage)
    return groups
