"""Several optimizers on the same batches, side by side: bytes per parameter, as counted, and loss."""

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
from zerosim.train.result import RunResult


class OptimizerComparison(InNotebook):
    """Results by optimizer; an OutOfMemory stands for one that did not fit."""

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
            prose(f"{counted(len(self.outcomes), 'optimizer')} under {stage}, on the same batches", "bold"),
            prose(self._trained(next(iter(self.results.values())))) if self.results else None,
            self._table() if self.results else None,
            *(prose(f"{name}: {error}.", "red") for name, error in self.failures.items()),
        )

    def _trained(self, result: RunResult) -> str:
        config = result.config
        return (
            f"Ψ = {result.num_parameters:,} parameters on {counted(config.mesh.ranks, 'rank')} in "
            f"{config.precision.param_dtype}; {counted(len(result.steps), 'step')} of {config.global_batch} x "
            f"{config.model.seq} tokens."
        )

    def _table(self) -> RenderableType:
        figures = ("lr", "K", "all states", "peak, bytes", "first loss", "last loss")
        grid = Grid("optimizer", "states", *(right(name) for name in figures))
        for name, result in self.results.items():
            costs = self.costs[name]
            states = sorted({state for memory in result.memory for state in memory.states})
            grid.add(
                OPTIMIZERS[name].title,
                ", ".join(states) or "none",
                f"{result.config.optim.resolved_lr:g}",
                _bytes(float(costs["optim"])),
                _bytes(float(costs["total"])),
                f"{max(memory.peak.total_bytes for memory in result.memory):,}",
                *(f"{sum(step) / len(step):.4f}" for step in (result.losses[0], result.losses[-1])),
            )
        note = (
            "K and all states: bytes per parameter when backward ends, as counted, padding left out. The learning rate "
            "is each optimizer's own; --lr sets one for all."
        )
        return titled("What an optimizer keeps, and how far it comes", Adaptive(grid, grid.short()), note)


def _bytes(value: float) -> str:
    return f"{value:.5g}"
