"""A buffer that is not trained is a row that is missing: no gradient, no optimizer state, no message for either."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from zerosim.config import RunConfig
from zerosim.placement.spec import FlatSpec
from zerosim.train.plan import plan
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(layers=4, hidden=16, heads=2, seq=8, vocab=256, steps=2, micro_batch=1, seed=5)
CASES: tuple[dict[str, Any], ...] = (
    *(dict(ranks=4, stage=stage) for stage in range(4)),
    *(dict(ranks=4, stage=stage, partition="owner") for stage in (1, 2, 3)),
    *(dict(ranks=4, stage=stage, dp_replicate=2) for stage in (1, 2, 3)),
    *(dict(ranks=2, stage=stage, recipe="deepspeed", reduce_bucket=2000) for stage in (1, 2, 3)),
    *(dict(ranks=2, stage=stage, recipe="fsdp2") for stage in (2, 3)),
    *(dict(ranks=2, stage=stage, recipe="megatron") for stage in (0, 1)),
    dict(ranks=2, stage=0, recipe="ddp"),
    dict(ranks=4, stage=3, tp=2, accumulate=2),
    dict(ranks=4, stage=2, pp=2, accumulate=2),
    dict(ranks=4, stage=1, pp=2, tp=2, clip_norm=0.1, precision="fp16"),
)


def trained(flat: FlatSpec) -> bool:
    return flat.unit in ("h.1", "ln_f")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_frozen_stays_as_it_was_and_a_plan_counts_the_same(case: dict[str, Any]) -> None:
    config = RunConfig(**SMALL, **case)
    result, planned = run(config, is_trained=trained), plan(config, is_trained=trained, every_rank=True)
    assert [one.to_dict() for one in planned.memory] == [one.to_dict() for one in result.memory]
    assert planned.traffic == result.traffic
    first = run(config.replace(steps=1), is_trained=lambda flat: False).weights
    changed = {name for name, values in result.weights.items() if np.any(values != first[name])}
    assert changed == {name for name in first if name.startswith(("h.1.", "ln_f."))}


@pytest.mark.bits
def test_the_stages_hold_and_send_what_is_trained_and_give_the_same_bits() -> None:
    """In elements: P parameters, of which T are trained; sizes that N divides."""
    config, n = RunConfig(**SMALL, ranks=4, stage=0), 4
    results = [run(config.replace(stage=stage), is_trained=trained) for stage in range(4)]
    flats = results[0].layout.flats.values()
    p, t = sum(flat.numel for flat in flats), sum(flat.numel for flat in flats if trained(flat))
    assert 0 < t < p
    for stage, result in enumerate(results):
        held = result.memory[0].marks["end_of_backward"].by_kind
        assert held["param"] == 2 * (p // n if stage == 3 else p)
        assert held["grad"] == 2 * (t // n if stage > 1 else t)
        assert held["optim"] == 12 * (t // n if stage else t)
        sent: Counter[str] = Counter()
        for row in result.traffic[0]:
            if row.step == 0 and row.purpose == "states":
                sent[row.op] += row.sent_bytes
        gathered = {0: 0, 1: t, 2: t, 3: 2 * (p + 256 * 16)}[stage]  # the tied table twice, as two units
        assert sent["all_gather"] == 2 * gathered * (n - 1) // n
        assert sent["reduce_scatter"] == (2 * t * (n - 1) // n if stage else 0)
        assert sent["all_reduce"] == (0 if stage else 4 * t * (n - 1) // n)
        assert all(np.array_equal(result.weights[name], one) for name, one in results[0].weights.items())
