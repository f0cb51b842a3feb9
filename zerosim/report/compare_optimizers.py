"""Several optimizers, or number formats, on the same batches: bytes per parameter, as counted, and loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

from zerosim.analysis.per_parameter import bytes_per_parameter
from zerosim.config import RunConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import OutOfMemory
from zerosim.report.look import Adaptive, Grid, Stack, prose, right, titled
from zerosim.report.names import STAGES, counted
from zerosim.report.notebook import InNotebook
from zerosim.report.tables import set_aside_text
from zerosim.train.result import RunResult


class OptimizerComparison(InNotebook):
    """Results by optimizer; an OutOfMemory stands for one that did not fit."""

    what = "optimizer"
    own = "lr"
    about_own = "The learning rate is each optimizer's own; --lr sets one for all."

    def title(self, name: str) -> str:
        return OPTIMIZERS[name].title

    def own_figure(self, result: RunResult) -> str:
        """In column `own`."""
        return f"{result.config.optim.lr:g}"

    def format_of(self, config: RunConfig) -> str:
        """What all runs have in common."""
        return f"in {config.precision.param_dtype}"

    def __init__(self, config: RunConfig, outcomes: Mapping[str, RunResult | OutOfMemory]) -> None:
        self.config = config
        self.outcomes = dict(outcomes)
        self.results = {name: out for name, out in outcomes.items() if isinstance(out, RunResult)}
        self.failures = {name: out for name, out in outcomes.items() if isinstance(out, OutOfMemory)}
        self.costs = {name: bytes_per_parameter(result) for name, result in self.results.items()}

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: every run's own with its bytes per parameter, or the error in its place."""
        runs: dict[str, Any] = {name: {"error": str(error)} for name, error in self.failures.items()}
        for name, result in self.results.items():
            costs = {kind: float(cost) for kind, cost in self.costs[name].items()}
            runs[name] = {**result.to_dict(), "bytes_per_parameter": costs}
        return {"schema": 1, "runs": {name: runs[name] for name in self.outcomes}}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        stage = STAGES[self.config.parallel.zero_stage]
        yield Stack(
            prose(f"{counted(len(self.outcomes), self.what)} under {stage}, on the same batches", "bold"),
            prose(self._trained(next(iter(self.results.values())))) if self.results else None,
            set_aside_text(*(result.config for result in self.results.values())),
            self._table() if self.results else None,
            *(prose(f"{name}: {error}.", "red") for name, error in self.failures.items()),
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
            costs = self.costs[name]
            states = sorted({state for memory in result.memory for state in memory.states})
            grid.add(
                self.title(name),
                ", ".join(states) or "none",
                self.own_figure(result),
                _bytes(float(costs["optim"])),
                _bytes(float(costs["total"])),
                f"{max(memory.peak.total_bytes for memory in result.memory):,}",
                *(f"{sum(step) / len(step):.4f}" for step in (result.losses[0], result.losses[-1])),
            )
        note = (
            f"K and all states: bytes per parameter when backward ends, as counted, padding left out. {self.about_own}"
        )
        return titled(f"What each {self.what} keeps, and how far it comes", Adaptive(grid, grid.short()), note)


class PrecisionComparison(OptimizerComparison):
    """Results by precision; of bf16-pure a rounding stands after a colon."""

    what = "precision"
    own = "stayed"
    about_own = (
        "Stayed: the share of the weights that a step left as they were, on average, although their update was not 0. "
        "Rounding to the nearest loses such an update, stochastic rounding is right on average, and Kahan's "
        "compensation keeps it."
    )

    def title(self, name: str) -> str:
        return name

    def own_figure(self, result: RunResult) -> str:
        lost = result.lost_updates
        return f"{100 * float(sum(lost)) / len(lost):.3g} %" if lost else "-"

    def format_of(self, config: RunConfig) -> str:
        return f"with {OPTIMIZERS[config.optim.optimizer].title}, learning rate {config.optim.lr:g}"


def _bytes(value: float) -> str:
    return f"{value:.5g}"
