"""A long step's clock jumps over laps, and every figure is equal to the last digit to that of all laps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from zerosim.config import plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.device.events import Launch, Scope, Wait
from zerosim.grading.waiting import OnPaper
from zerosim.ledger.clock import simulate
from zerosim.ledger.entries import Busy, Entry
from zerosim.ledger.splice import Reading, Spliced, spliced
from zerosim.parallel.pipeline import SCHEDULES
from zerosim.placement.mesh import Mesh
from zerosim.train import plan as planning
from zerosim.train.plan import plan

H100 = cluster_of(find_hardware("h100"))
SMALL: dict[str, Any] = dict(model="gpt", hidden=256, heads=4, seq=128, vocab=1000, stage=1, accumulate=400)
EXPERTS = dict(model="mixtral", experts=4, top_k=2, expert_ffn=128)
PIPELINES = [
    *(dict(pp=4, ranks=4, pipeline=kind, layers=8) for kind in SCHEDULES),
    dict(pp=2, ranks=8, tp=2, layers=4, stage=2, recipe="megatron", sequence_parallel=True, cuda_graphs=True),
    dict(pp=4, ranks=8, layers=6, stage_layers="0,2,3,1", recompute="full", pipeline="zb-h1"),
    dict(pp=2, ranks=4, layers=4, stage=2, recipe="fsdp2", hidden=32, seq=16),
    dict(EXPERTS, pp=2, ranks=4, ep=2, layers=4, recipe="megatron"),
]


class Counted:
    """How many laps ranks have read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.laps, lap = 0, Reading.lap

        def counted(reading: Reading) -> range:
            self.laps += 1
            return lap(reading)

        monkeypatch.setattr(Reading, "lap", counted)


@pytest.mark.quick(2)
@pytest.mark.parametrize("fields", PIPELINES, ids=str)
def test_a_jump_changes_no_digit(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found, counted = list[Any](), Counted(monkeypatch)

    def both(paces: Any, *how: Any) -> Any:
        short, laps = simulate(paces, *how), counted.laps
        assert laps < sum(len(pace.laps) for pace in paces.values()) / 2
        found.append((short, simulate({rank: list(pace) for rank, pace in paces.items()}, *how)))
        return short

    monkeypatch.setattr(planning, "simulate", both)
    plan(plan_config(**SMALL | fields), cluster=H100)
    for short, whole in found:
        assert short.tracks == whole.tracks


class Slow(OnPaper):
    """A call takes its host some time, and slows kernels down."""

    contention = 0.07

    def __init__(self, launch: float) -> None:
        self.of_call = launch

    def call(self, event: Any) -> float:
        return self.of_call

    def collective(self, launch: Launch) -> float:
        return launch.payload_bytes / 7e3


def drawn(seed: int, rank: int, laps: int) -> list[Entry]:
    """Each lap computes, launches calls of both ranks, and waits for some of an earlier lap or of this one; then the
    rank waits for what is left."""
    alike, own, found = random.Random(seed), random.Random(f"{seed} {rank}"), list[Entry]()
    calls = [(alike.choice(["dp_shard", "tp"]), alike.randint(1, 900)) for _ in range(alike.randint(1, 3))]
    ago = [alike.randint(0, 2) for _ in calls]
    seconds = [own.random() * own.choice([0.1, 1, 1]) for _ in calls]
    host, numbers = [own.random() / 50 for _ in calls], Counter[str]()

    def wait(number: int, at: int, scope: Scope) -> Iterator[Wait]:
        if number >= 0:
            yield Wait(scope, number * len(calls) + at)

    for lap in range(laps):
        scope = Scope(0, "forward", "unit", lap)
        for at, (axis, nbytes) in enumerate(calls):
            found.append(Busy(scope, "unit", seconds[at], 3, 2, 1, host[at], host[at] + seconds[at]))
            work, number = lap * len(calls) + at, numbers[axis]
            numbers[axis] += 1
            found.append(Launch(scope, work, "all_gather", "bf16", "states", axis, (0, 1), number, nbytes, 8, 8))
            found += wait(lap - ago[at], at, scope)
    end = Scope(0, "optimizer", "end")
    for at in range(len(calls)):
        for number in range(laps - ago[at], laps):
            found += wait(number, at, end)
    return [*found, Busy(end, "end", 0.1, 0, 0)]


@pytest.mark.parametrize("seed", range(40))
def test_no_digit_of_a_drawn_step_depends_on_a_jump(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {rank: spliced(drawn(seed, rank, 8), drawn(seed, rank, 9), 300) for rank in (0, 1)}
    long = {rank: step for rank, step in found.items() if isinstance(step, Spliced)}
    assert len(long) == 2
    mesh, costs, counted = Mesh(dp_shard=2), Slow(seed % 4 / 20), Counted(monkeypatch)
    short = simulate(long, [0, 1], mesh, costs)
    laps = counted.laps
    whole = simulate({rank: drawn(seed, rank, 309) for rank in (0, 1)}, [0, 1], mesh, costs)
    assert short.tracks == whole.tracks
    assert laps < 300
