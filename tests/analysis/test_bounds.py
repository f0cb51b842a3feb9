"""Bounds and estimates of a step: no plan is below its bounds, and a pipeline's estimate is near its plan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from zerosim.analysis.candidate import candidate
from zerosim.analysis.estimate import Bounds
from zerosim.analysis.mesh_search import Known
from zerosim.analysis.meshes import arranged, beside, ladders
from zerosim.analysis.search import Devices
from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware

NODE, BATCH, DRAWN = 4, 16, 30
H100 = cluster_of(find_hardware("h100-80"), node_gpus=NODE)
NODES = cluster_of(find_hardware("h100-80"), node_gpus=8)
SIZES: dict[str, Any] = dict(layers=6, hidden=128, heads=4, seq=128, vocab=512, ranks=8, attention="flash")
MODELS: dict[str, dict[str, Any]] = {
    "dense": dict(model="llama"),
    "experts": dict(model="llama", experts=8, top_k=2, expert_ffn=128),
}


def space(config: RunConfig) -> Iterator[RunConfig]:
    """Yield every candidate of a search, and what is tried beside each mesh's first."""
    for family in ladders(config, BATCH, NODE):
        yield from family
        yield from beside(family[0], NODE)


@pytest.mark.quick(1)
@pytest.mark.parametrize("is_piped", [False, True], ids=["whole", "pipelines"])
@pytest.mark.parametrize("recipe", ["paper", "usual"])
@pytest.mark.parametrize("model", MODELS)
def test_no_plan_is_below_its_bounds(model: str, recipe: str, is_piped: bool) -> None:
    config = plan_config(**SIZES, **MODELS[model], recipe=recipe)
    least, devices = Bounds(config, H100), Devices(10**18, cluster=H100)
    found = sorted({one for one in space(config) if (one.mesh.pp > 1) == is_piped}, key=lambda one: repr(one.to_dict()))
    drawn = random.Random(f"bounds {model} {recipe}").sample(found, min(DRAWN, len(found)))
    assert len(drawn) > 20
    for asked in drawn:
        took = devices.within(asked)
        assert took is not None
        assert took.time is not None
        assert 0 < least.seconds(asked) <= took.time.seconds, asked
        assert 0 < least.nbytes(asked) <= took.peak_bytes, asked


SCHEDULES: list[dict[str, Any]] = [
    dict(recipe="megatron"),
    dict(recipe="megatron", pipeline="interleaved", virtual_stages=2),
    dict(recipe="fsdp2", pipeline="zb-h1"),
    dict(recipe="fsdp2", pipeline="zb-v"),
    dict(recipe="paper"),
]
CUTS: list[dict[str, Any]] = [
    dict(ranks=16, tp=2, pp=2),
    dict(ranks=16, tp=4, pp=4, micro_batch=2),
    dict(ranks=32, tp=1, pp=4, recompute="full"),
    dict(ranks=64, tp=2, pp=4),
    dict(ranks=64, tp=8, pp=2, micro_batch=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_an_estimate_of_a_pipeline_is_near_its_plan(cut: dict[str, Any], schedule: dict[str, Any]) -> None:
    """A stage alone waits for reductions between nodes that zero bubble's weight gradients hide: up to 6 % more."""
    values = cut | schedule
    ranks, tp, pp = (values.pop(name) for name in ("ranks", "tp", "pp"))
    stage = 2 if values["recipe"] == "fsdp2" else 1
    start = plan_config(model="llama3-8b", layers=16, ranks=ranks, attention="flash")
    asked = arranged(start, ranks, tp, pp, stage, accumulate=4 * pp, sequence_parallel=tp > 1, **values)
    assert asked is not None
    devices = Devices(10**18, cluster=NODES)
    tried, estimate = devices.within(asked), Known(asked, devices).estimate
    assert tried is not None
    assert tried.time is not None
    took = tried.time
    seconds, nbytes = estimate(asked)
    print(f"{seconds / took.seconds - 1:+.2%}", values, ranks, tp, pp)
    hides = schedule.get("pipeline") == "zb-h1" and ranks // pp > NODES.node_gpus
    assert 0.97 * took.seconds <= seconds <= (1.06 if hides else 1.03) * took.seconds
    assert nbytes == 0
    again = candidate(asked, accumulate=2 * asked.data.accumulate).sure()
    assert seconds < estimate(again)[0] < 2 * seconds
