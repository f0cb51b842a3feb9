"""Count the bytes of model states per parameter (K in the paper), for any ZeRO stage and mesh."""

from __future__ import annotations

from fractions import Fraction

from zerosim.analysis.compare import check_states
from zerosim.analysis.formulas import first_partitioned
from zerosim.analysis.shares import share_of
from zerosim.train.result import RunResult


def bytes_per_parameter(result: RunResult) -> dict[str, Fraction]:
    """Return bytes per parameter by kind (param, grad, optim, total) when backward ends. Divide the bytes of the first
    pipeline stage's ranks, without padding, by their parameters, each counted once per copy in the stage."""
    config, share = result.config, share_of(result, 0)
    found: dict[str, Fraction] = {}
    for check in check_states(result)[:-1]:
        cut = config.mesh.shards if config.states_stage >= first_partitioned(check.kind) else 1
        held = sum(check.counted) - sum(check.padding)
        found[check.kind] = Fraction(held * cut, share.num_parameters * len(share.ranks))
    return {**found, "total": sum(found.values(), Fraction(0))}
