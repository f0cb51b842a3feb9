"""States that are made in the first step: the same bits, and bytes that come a step later."""

from __future__ import annotations

import numpy as np
import pytest

from zerosim.analysis.checks import checks
from zerosim.config import RunConfig
from zerosim.train.plan import plan
from zerosim.train.run import run

pytestmark = pytest.mark.bits


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lazy_states_come_in_the_first_step_and_change_no_bit(stage: int, precision: str) -> None:
    config = RunConfig(
        layers=1, hidden=16, heads=2, seq=8, vocab=256, ranks=2, stage=stage, steps=3, precision=precision, accumulate=2
    )
    lazy = config.replace(lazy_states=True)
    plain, late = run(config), run(lazy)
    assert late.losses == plain.losses
    assert all(np.array_equal(late.weights[name], plain.weights[name]) for name in plain.weights)
    for before, after in zip(plain.memory, late.memory, strict=True):
        assert after.states == before.states
        assert after.peak.total_bytes == before.peak.total_bytes
        moments = before.states["exp_avg"] + before.states["exp_avg_sq"]
        assert after.marks["after_init"].total_bytes == before.marks["after_init"].total_bytes - moments
    assert all(check.agrees for check in checks(late)[0].states)
    assert all(check.agrees for check in checks(run(lazy.replace(steps=1)))[0].states)
    planned = plan(lazy.replace(steps=None), every_rank=True)
    assert [one.to_dict() for one in planned.memory] == [one.to_dict() for one in run(lazy.replace(steps=2)).memory]
    first = [one.first_step_bytes for one in planned.memory]
    assert first == [one.peak.total_bytes for one in plan(lazy.replace(steps=1), every_rank=True).memory]
    assert all(begun < one.peak.total_bytes for begun, one in zip(first, planned.memory, strict=True))


def test_the_first_step_of_an_extended_plan_is_that_of_all_its_microbatches() -> None:
    config = RunConfig(
        layers=4, hidden=16, heads=2, seq=8, vocab=64, ranks=8, pp=4, stage=1, accumulate=24, lazy_states=True
    )
    short, whole = plan(config), plan(config, keep_events=True)
    assert short.extended_from is not None
    assert [one.first_step_bytes for one in short.memory] == [one.first_step_bytes for one in whole.memory]
