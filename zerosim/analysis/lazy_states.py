"""Optimizer states that are made in the first step that is not skipped."""

from __future__ import annotations

from dataclasses import replace

from zerosim.analysis.capabilities import in_backward
from zerosim.analysis.cost import cost_of, master_bytes
from zerosim.analysis.formulas import BytesPerParameter
from zerosim.train.result import RunResult


def held_cost(result: RunResult, stage: int) -> BytesPerParameter:
    """Return the bytes per parameter on a pipeline stage when backward ends: without optimizer states where they are
    made in the step after it."""
    cost = cost_of(result, stage)
    return cost if has_states(result) else replace(cost, optim=master_bytes(result.config))


def has_states(result: RunResult) -> bool:
    """Return whether there are optimizer states when backward ends."""
    config, steps = result.config, result.steps
    made_by = steps if in_backward.frees(config) else steps[:-1]
    return not config.optim.lazy_states or any(not step.skipped for step in made_by)
