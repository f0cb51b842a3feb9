"""The search's best beside the best of all candidates, each of which is planned whole. The fastest does not fit.

Two of eight jobs are tests. `python tests/analysis/test_all_candidates.py` runs all of them, which takes many minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from zerosim.analysis.candidate import accepted, candidate
from zerosim.analysis.mesh_search import best_meshes
from zerosim.analysis.meshes import beside, ladder, ladders, wider
from zerosim.analysis.search import Devices, Tried
from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import Cluster, cluster_of
from zerosim.config.presets.hardware import find_hardware

NEAR = 1.02
"""How many times as long as the best of all candidates the search's best may take."""


class Job(NamedTuple):
    """What is trained, with how many rows in a step, on which GPUs, so many a node."""

    model: dict[str, Any]
    batch: int
    gpu: str = "h100-80"
    node: int = 8

    @property
    def cluster(self) -> Cluster:
        return cluster_of(find_hardware(self.gpu), node_gpus=self.node)

    @property
    def config(self) -> RunConfig:
        return plan_config(**{"recipe": "usual", "attention": "flash", **self.model})


LLAMA: dict[str, Any] = dict(model="llama", hidden=2048, heads=16, kv_heads=8, vocab=32_000, seq=2048)
JOBS = {
    "dense": Job(dict(LLAMA, layers=8, ranks=4), 8),
    "two nodes": Job(dict(LLAMA, layers=4, ranks=8), 8, node=4),
    "long rows": Job(dict(LLAMA, layers=4, ranks=4, seq=16_384), 2, "a100-80"),
    "few rows": Job(dict(LLAMA, layers=4, ranks=8), 4),
    "uneven": Job(dict(LLAMA, model="gpt", kv_heads=16, layers=7, ranks=4), 8, "a100-80"),
    "experts": Job(dict(LLAMA, layers=4, ranks=4, experts=8, top_k=2, expert_ffn=1024), 4),
    "the paper": Job(dict(LLAMA, layers=4, ranks=4, recipe="paper"), 4, "v100-32"),
    "16 ranks": Job(dict(LLAMA, layers=2, ranks=16, recipe="megatron"), 8, node=8),
}


def everything(config: RunConfig, batch: int, node: int) -> Iterator[RunConfig]:
    """Yield all candidates: what a search may try, and what it may try beside each of these, and beside those."""
    waiting, seen = [(family, False) for family in ladders(config, batch, node)], set[RunConfig]()
    while waiting:
        family, is_beside = waiting.pop()
        if family[0] in seen and all(one in seen for one in family):
            continue
        for asked in family:
            if asked not in seen:
                seen.add(asked)
                yield asked
                waiting += [(ladder(other), True) for other in beside(asked, node)]
        if not is_beside:
            data = family[0].data
            rows = accepted([candidate(family[0], micro_batch=1, accumulate=data.micro_batch * data.accumulate)])
            waiting += [(ladder(cut), False) for row in rows for cut in wider(row)]


def planned(job: Job) -> dict[RunConfig, Tried]:
    devices = Devices(10**18, cluster=job.cluster)
    every = {asked: devices.within(asked) for asked in everything(job.config, job.batch, job.node)}
    return {asked: tried for asked, tried in every.items() if tried is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["long rows", "16 ranks"])
def test_the_best_is_near_the_best_of_all_candidates(name: str) -> None:
    job = JOBS[name]
    every = planned(job)
    order = sorted(every.values(), key=lambda one: one.order)
    peaks = sorted(one.peak_bytes for one in order)
    room = min(peaks[len(peaks) // 3], order[0].peak_bytes - 1)  # less than the fastest needs
    devices = Devices(room, cluster=job.cluster)
    result = best_meshes(job.config, ladders(job.config, job.batch, job.node), devices, node=job.node)
    fitting = [one for one in order if one.peak_bytes <= room]
    assert fitting
    plausible = [one for one in fitting if not devices.is_implausible(one)] or fitting
    ratio = result.found[0].order[0] / plausible[0].order[0]
    print(f"{name}: {ratio:.4f} of {len(every)}, {len(fitting)} fit {room:,}; {result.planned} planned whole")
    assert result.ended
    assert result.planned < len(every) / 4
    assert result.found[0].peak_bytes <= room
    assert ratio <= NEAR, (plausible[0].config, result.found[0].config)


if __name__ == "__main__":
    for each in JOBS:
        test_the_best_is_near_the_best_of_all_candidates(each)
