"""Count the bytes of model states per parameter (K in the paper), for any ZeRO stage and mesh."""

from __future__ import annotations

from fractions import Fraction

from zerosim.analysis.checks import checks
from zerosim.analysis.formulas import first_partitioned
from zerosim.train.result import RunResult


def bytes_per_parameter(result: RunResult) -> dict[str, Fraction]:
    """Return bytes per parameter by kind (param, grad, optim, total) when backward ends. Divide the bytes of the first
    pipeline stage's ranks, without padding, by their parameters, each counted once per copy in the stage."""
    config, first = result.config, checks(result)[0]
    share = first.of.share
    found: dict[str, Fraction] = {}
    for check in first.states[:-1]:
        cut = config.mesh.shards if config.states_stage >= first_partitioned(check.name) else 1
        found[check.name] = check.mean * cut / share.num_parameters
    return {**found, "total": sum(found.values(), Fraction(0))}
