"""What no one would wait for is refused beforehand, by an estimate that is near what a plan records."""

from __future__ import annotations

import re
from typing import Any

import pytest

from zerosim.config.run import RunConfig, plan_config
from zerosim.device.events import Event
from zerosim.device.stretches import one_by_one
from zerosim.errors import InputError
from zerosim.train import plan as planning
from zerosim.train.plan import check_plan_of, plan
from zerosim.train.run import run
from zerosim.train.work import check_plan, check_run, expected_work

PLANS: list[dict[str, Any]] = [
    dict(stage=0),
    dict(stage=3, layers=20),
    dict(stage=1, bucket_bytes=2000),
    dict(stage=3, bucket_bytes=2000, accumulate=2),
    dict(recipe="deepspeed", recompute="full", layers=8),
    dict(model="llama", bucket_bytes=500),
    dict(model="flat", params=10**6, units=50),
    dict(stage=3, steps=5),
    dict(optimizer="muon", ranks=16),
    dict(pp=2, tp=2, ranks=8, accumulate=3, bucket_bytes=5000),
]


@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_a_plan_records_about_as_many_events_as_expected(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = 0
    read = planning._UnevenReductions.read

    def counting(self: Any, events: list[Event]) -> None:
        nonlocal counted
        counted += sum(1 for _ in one_by_one(events))
        read(self, events)

    monkeypatch.setattr(planning._UnevenReductions, "read", counting)
    config = plan_config(**fields)
    plan(config)
    expected = expected_work(config, micro_batches=config.data.accumulate)
    assert counted / 2.5 < expected.events < counted * 2.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(model="gpt2", bucket_bytes=100), "bucket_bytes 100: a plan would record about"),
        (dict(model="gpt2", steps=10**8), "steps 100000000: "),
        (dict(model="gpt2", accumulate=10**7, allocator="caching"), "accumulate 10000000: "),
        (dict(model="gpt2", layers=100_000, steps=10), "layers 100000: "),
        (dict(model="flat", params=10**9, units=10**5, steps=50), "units 100000: "),
        (dict(model="gpt2", collective="ring", ranks=65536), "collective 'ring' over 65536 ranks: "),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_endless_plan_is_refused_and_told_what_is_possible(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as raised:
        plan(plan_config(**fields))
    name, _, right = re.sub(r"[^\w ]", "", str(raised.value)).partition(" choose ")
    if (number := right.split()[0]).isdecimal():
        check_plan(config := plan_config(**{**fields, name.split()[0]: int(number)}), config.data.accumulate)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(layers=100_000), "layers 100000: a step would record about"),
        (dict(bucket_bytes=1, hidden=128), "bucket_bytes 1: a step would record"),
        (dict(accumulate=10**7), "accumulate 10000000: a step"),
        (dict(model="gpt2-xl", micro_batch=10**6), "floating-point operations"),
        (dict(micro_batch=10**7), "this machine has"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_endless_run_is_refused_before_anything_is_built(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(RunConfig(**fields))


def test_what_people_run_is_far_from_the_bound() -> None:
    check_run(RunConfig(model="gpt2-xl", ranks=8))
    check_run(RunConfig(layers=48, hidden=64, steps=10**8))
    check_plan_of(plan_config(model="1t", ranks=1024, tp=8, pp=64, accumulate=512, pad_vocab=True))
    check_plan_of(plan_config(layers=100_000))
