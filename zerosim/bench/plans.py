"""Time the plans that an engineer waits for, as ratios to a plan of one block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from zerosim.bench.contest import Budget, Contestant, Progress, Timing, interleave, timed
from zerosim.bench.figures import Figure, ratio
from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import Cluster, cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.train.plan import plan

ONE = "one block of llama3-8b"
STAGES_405B = ",".join(["7", *["8"] * 14, "7"])
PLANS: Mapping[str, tuple[Mapping[str, Any], float]] = MappingProxyType(
    {
        "llama3.1-405b on 8,192 ranks, pp 16": (
            dict(model="llama3.1-405b", ranks=8192, tp=8, pp=16, stage=1, accumulate=64, stage_layers=STAGES_405B),
            240,
        ),
        "gpt3-175b, 8 stages x 6 chunks": (
            dict(model="gpt3-175b", ranks=64, tp=8, pp=8, stage=1, pipeline="interleaved", virtual_stages=6)
            | dict(accumulate=64, pad_vocab=True),
            360,
        ),
        "1t, pp 64": (dict(model="1t", ranks=512, tp=8, pp=64, stage=1, accumulate=64), 160),
        "llama3-8b with Muon on 64 ranks": (dict(model="llama3-8b", ranks=64, stage=2, optimizer="muon"), 120),
        "gpt3-175b, zb-v, 512 microbatches on H100": (
            dict(model="gpt3-175b", ranks=4096, tp=8, pp=16, stage=1, pipeline="zb-v", accumulate=512, pad_vocab=True),
            1400,
        ),
        "llama3-8b, 256 microbatches, caching allocator": (
            dict(model="llama3-8b", ranks=8, stage=1, accumulate=256, allocator="caching"),
            240,
        ),
        "llama3-8b on 8 H100": (dict(model="llama3-8b", ranks=8), 9),
    }
)
"""Configurations and goals: 1, 1.5, 0.7, 0.5, 6, 1 and 0.04 s on a machine where a plan of one block takes 4.2 ms."""
TIMED_ON = "H100"


class Plans(Contestant):
    """A contestant that plans one configuration, on a cluster or without a clock."""

    def __init__(self, config: RunConfig, cluster: Cluster | None = None) -> None:
        self.config, self.cluster = config, cluster

    def step(self) -> Timing:
        return timed(lambda: plan(self.config, cluster=self.cluster))


def plan_times(budget: Budget, progress: Progress) -> Iterator[Figure]:
    """Return each plan's time over that of one block, gathered and recomputed."""
    one = plan_config(model="llama3-8b", layers=1, stage=3, ranks=64, recompute="full")
    for name, (fields, goal) in PLANS.items():
        cluster = cluster_of(find_hardware("h100-80")) if name.endswith(TIMED_ON) else None
        contestants = {name: Plans(plan_config(**fields), cluster), ONE: Plans(one)}
        measured = interleave(contestants, budget, progress, f"plan of {name}")
        yield ratio("", f"plan of {name} / {ONE}", measured, name, ONE, goal)
