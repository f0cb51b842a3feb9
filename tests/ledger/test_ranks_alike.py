"""Ranks that begin alike run once until they differ, and every figure is equal to the last digit to that of all."""

from __future__ import annotations

from typing import Any

import pytest

from zerosim.config import plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.ledger import clock
from zerosim.ledger.clock import simulate
from zerosim.train import plan as planning
from zerosim.train.plan import plan

H100 = cluster_of(find_hardware("h100"))
SMALL: dict[str, Any] = dict(model="gpt", hidden=256, heads=4, seq=128, vocab=1000, tp=2, sequence_parallel=True)
STEPS = [
    dict(pp=2, ranks=32, layers=4, accumulate=12, stage=1, recipe="megatron", tp_comm_overlap=True),
    dict(pp=4, ranks=48, layers=8, accumulate=24, stage=1, pipeline="interleaved", overlap="all"),
    dict(pp=2, ranks=24, layers=4, accumulate=40, stage=2, pipeline="gpipe", recompute="full"),
    dict(pp=2, ranks=24, layers=4, accumulate=16, stage=1, pipeline="zb-h1", recipe="megatron"),
]


@pytest.mark.parametrize("fields", STEPS, ids=str)
def test_one_rank_for_all_that_begin_alike_changes_no_digit(fields: dict[str, Any], monkeypatch: Any) -> None:
    found = list[Any]()

    def both(paces: Any, *how: Any) -> Any:
        one = simulate(paces, *how)
        together = clock.alike(paces, *how)
        assert together is not None
        assert len(together.leaders) < len(paces) == len(together.ranks)
        with monkeypatch.context() as patch:
            patch.setattr(clock, "alike", lambda *how: None)
            found.append((one, simulate(paces, *how)))
        return one

    monkeypatch.setattr(planning, "simulate", both)
    plan(plan_config(**SMALL | fields), cluster=H100)
    assert found
    for one, every in found:
        assert one.tracks == every.tracks
        assert len({(track.end, track.flops) for track in one.tracks.values()}) > 1


def test_ranks_whose_forwards_differ_all_run() -> None:
    """Of two ranks one computes longer in each microbatch: neither stands for the other."""
    found = list[Any]()

    def seen(paces: Any, *how: Any) -> Any:
        slow = dict(paces)
        rank = max(slow)
        slow[rank].entries = [
            one._replace(seconds=one.seconds * 2) if hasattr(one, "seconds") else one for one in slow[rank].entries
        ]
        found.append(clock.alike(slow, *how))
        return simulate(paces, *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "simulate", seen)
        plan(plan_config(**SMALL | STEPS[0]), cluster=H100)
    assert found == [None]
