"""Compressed gradients: what is sent is what was encoded, at every stage, and in plans as in runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.analysis.capability import Key
from zerosim.analysis.forms import forms
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(
    layers=2, hidden=16, heads=2, seq=8, vocab=256, micro_batch=1, steps=3, seed=5, ranks=4, precision="fp32"
)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"overlap_reduction": True, "bucket_bytes": 4000},
    {"reduce_bucket": 3000},
    {"dp_replicate": 2},
    {"accumulate": 2},
    {"collective": "ring"},
]


def grads_sent(result: RunResult) -> int:
    reduces = ("reduce_scatter", "all_reduce")
    return sum(row.sent_bytes for row in result.traffic[0] if row.op in reduces and row.phase == "backward")


@pytest.mark.quick(1)
@pytest.mark.parametrize("compress", ["fp16", "bf16"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_casts_send_half_and_plans_count_the_same(compress: str, options: dict[str, Any]) -> None:
    stages = [stage for stage in range(4) if stage or not options.keys() & {"reduce_bucket", "dp_replicate"}]
    results = {}
    for stage in stages:
        config = RunConfig(**SMALL, **options, stage=stage, compress=compress)
        plain, results[stage] = run(config.replace(compress="none")), run(config)
        planned = plan(config, every_rank=True)
        assert planned.traffic == results[stage].traffic
        assert [one.to_dict() for one in planned.memory] == [one.to_dict() for one in results[stage].memory]
        if "dp_replicate" not in options:  # replicas average decoded parts, in fp32
            assert 2 * grads_sent(results[stage]) == grads_sent(plain) > 0
        assert results[stage].losses[0] == plain.losses[0]
        assert results[stage].losses != plain.losses
        assert np.allclose(results[stage].losses, plain.losses, atol=2e-3)
    # Stages 2 and 3 round each microbatch's sum, 0 and 1 that of all of them.
    alike = [(2, 3), (0, 1)] if "accumulate" in options else [(stage, 3) for stage in stages if stage < 3]
    for first, second in alike:
        if first not in stages or options.get("collective") == "ring":
            continue
        one, other = results[first].weights, results[second].weights
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_the_mean_is_rounded_and_not_the_sum() -> None:
    """The weights after a plain step on gradients whose mean is cast by hand: what fp32 gives, within one rounding."""
    config = RunConfig(**{**SMALL, "steps": 1, "optimizer": "sgd", "lr": 1.0}, stage=2, clip_norm=None)
    before = run(config.replace(lr=1e-30)).weights
    exact, cast = run(config).weights, run(config.replace(compress="bf16")).weights
    for name, start in before.items():
        wanted, got = start - exact[name], start - cast[name]
        assert np.abs(got - wanted).max() <= 2 * 2.0**-8 * max(np.abs(wanted).max(), 1e-12) + 1e-6


@pytest.mark.parametrize("stage", range(4))
def test_the_closed_form_is_that_of_two_bytes(stage: int) -> None:
    config = RunConfig(**SMALL, stage=stage, compress="fp16")
    key = Key("sent", "reduce_scatter" if stage else "all_reduce", "states")
    cast, plain = forms(config)[key], forms(config.replace(compress="none"))[key]
    assert cast.elements == plain.elements
    assert 2 * cast.at(Ψ=1000, N=4, q=2) == plain.at(Ψ=1000, N=4, g=4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(compress="fp16", precision="bf16"), "gradients are bf16, which is not wider; choose grad_dtype fp32"),
        (dict(compress="bf16", precision="fp32", stage=2, partition="owner"), "the owner reduces gradients in place"),
        (dict(compress="bf16", precision="fp32", stage=2, grad_reduction="all_reduce"), "arrive as local slices"),
        (dict(compress="topk", precision="fp32"), "did you mean 'top-k'"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        RunConfig(**{**SMALL, **fields})
