"""Count the bytes of model states per parameter (K in the paper), for any ZeRO stage and mesh."""

from __future__ import annotations

from fractions import Fraction

from zerosim.analysis.checks import checks
from zerosim.analysis.formulas import first_partitioned
from zerosim.analysis.shares import ranks_of
from zerosim.train.result import RunResult


def bytes_per_parameter(result: RunResult) -> dict[str, Fraction]:
    """Return bytes per parameter by kind (param, grad, optim, total) when backward ends. Divide the bytes of the first
    pipeline stage's ranks, without padding, by their parameters, each counted once per copy in the stage."""
    config, first = result.config, checks(result)[0]
    share, layout = first.of.share, result.layout
    found: dict[str, Fraction] = {}
    for check in first.states[:-1]:
        is_cut = config.states_stage >= first_partitioned(check.name)
        of_rank = sum(Fraction(numel, ranks_of(layout, name) if is_cut else 1) for name, numel in share.numels.items())
        found[check.name] = check.mean / of_rank
    return {**found, "total": sum(found.values(), Fraction(0))}
