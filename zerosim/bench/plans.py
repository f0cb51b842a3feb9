"""Time the plans that an engineer waits for, as ratios to a plan of one block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from zerosim.bench.contest import Budget, Contestant, Progress, Timing, interleave, timed
from zerosim.bench.figures import Figure, ratio
from zerosim.config import RunConfig, plan_config
from zerosim.train.plan import plan

ONE = "one block of llama3-8b"
STAGES_405B = ",".join(["7", *["8"] * 14, "7"])
PLANS: Mapping[str, tuple[Mapping[str, Any], float]] = MappingProxyType(
    {
        "llama3.1-405b on 8,192 ranks, pp 16": (
            dict(model="llama3.1-405b", ranks=8192, tp=8, pp=16, stage=1, accumulate=64, stage_layers=STAGES_405B),
            720,
        ),
        "gpt3-175b, 8 stages x 6 chunks": (
            dict(model="gpt3-175b", ranks=64, tp=8, pp=8, stage=1, pipeline="interleaved", virtual_stages=6)
            | dict(accumulate=64, pad_vocab=True),
            960,
        ),
        "1t, pp 64": (dict(model="1t", ranks=512, tp=8, pp=64, stage=1, accumulate=64), 480),
        "llama3-8b with Muon on 64 ranks": (dict(model="llama3-8b", ranks=64, stage=2, optimizer="muon"), 360),
    }
)
"""Configurations and goals: 3, 4, 2 and 1.5 s on a machine where a plan of one block takes 4.2 ms."""


class Plans(Contestant):
    """A contestant that plans one configuration."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def step(self) -> Timing:
        return timed(lambda: plan(self.config))


def plan_times(budget: Budget, progress: Progress) -> Iterator[Figure]:
    """Return each plan's time over that of one block, gathered and recomputed."""
    one = plan_config(model="llama3-8b", layers=1, stage=3, ranks=64, recompute="full")
    for name, (fields, goal) in PLANS.items():
        contestants = {name: Plans(plan_config(**fields)), ONE: Plans(one)}
        measured = interleave(contestants, budget, progress, f"plan of {name}")
        yield ratio("", f"plan of {name} / {ONE}", measured, name, ONE, goal)
