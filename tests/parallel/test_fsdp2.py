"""FSDP2 as it is: replicas averaged in every microbatch, pure bf16, adapters cut along dimension 0."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from same import assert_same_weights

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.config import RunConfig
from zerosim.device.events import Launch
from zerosim.train.plan import plan
from zerosim.train.run import run

GPT: dict[str, Any] = dict(layers=3, hidden=16, heads=2, seq=8, vocab=256, steps=2, micro_batch=1, ranks=4, stage=3)
FSDP2 = GPT | dict(recipe="fsdp2")


def calls(config: RunConfig) -> Counter[str]:
    """Return the collectives of a step that rank 0 launches in backward or for it, by operation."""
    recorded = plan(config, keep_events=True).events[0]
    return Counter(e.op for e in recorded if isinstance(e, Launch) and e.scope.phase == "backward" and not e.scope.step)


@pytest.mark.parametrize("recipe", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("stage", [2, 3])
def test_replicas_are_averaged_in_every_microbatch(recipe: str, stage: int) -> None:
    config = RunConfig(**GPT | dict(recipe=recipe, stage=stage, dp_replicate=2, accumulate=3))
    found = calls(config)
    assert found["all_reduce"] == found["reduce_scatter"] == 3 * 6
    assert calls(config.replace(replica_reduction="step"))["all_reduce"] == 6


def test_averages_in_flight_change_no_bit_and_no_byte() -> None:
    """They arrive when the microbatch's backward ends. One rank's sums are of averages, as without overlap."""
    config = RunConfig(**FSDP2, dp_replicate=2, accumulate=3)
    result, planned = run(config), plan(config, every_rank=True)
    assert formulas_agree(checks(result))
    assert planned.traffic == result.traffic
    assert [one.to_dict() for one in planned.memory] == [one.to_dict() for one in result.memory]
    assert_same_weights(result, run(config.replace(overlap_reduction=False)))
    assert result.live_bytes_after == [0] * 4


@pytest.mark.parametrize("recipe", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("stage", [2, 3])
def test_pure_bf16_has_no_masters_and_is_reduced_in_bf16(recipe: str, stage: int) -> None:
    config = RunConfig(**GPT | dict(recipe=recipe, stage=stage, precision="bf16-pure"))
    result = run(config)
    assert_same_weights(result, run(config.replace(recipe="paper")))
    assert formulas_agree(checks(result))
    at_end = result.memory[0].marks["end_of_backward"]
    held = sum(at_end.by_kind[kind] - at_end.padding.get(kind, 0) for kind in ("grad", "optim"))
    assert 4 * held == 6 * result.num_parameters  # 2 + 4 bytes, divided by the ranks
