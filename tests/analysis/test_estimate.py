"""Estimates from plans of a few blocks, beside plans of all of them."""

from __future__ import annotations

from typing import Any

import pytest

from zerosim.analysis.mesh_search import Known
from zerosim.analysis.recompute import ever_more_recompute
from zerosim.analysis.search import Devices
from zerosim.config import RunConfig, plan_config

LLAMA = dict(model="llama3-8b", ranks=8, accumulate=4, seq=2048, precision="bf16")


def config_of(**values: Any) -> RunConfig:
    return plan_config(**{**LLAMA, **values})


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("stage", "recipe"), [(3, "fsdp2"), (2, "fsdp2"), (3, "deepspeed"), (2, "deepspeed"), (1, "megatron"), (0, "ddp")]
)
def test_an_estimate_has_no_more_bytes_than_the_whole_plan(stage: int, recipe: str, recompute: str) -> None:
    """An estimate that is too high refuses what fits. One that is too low, as with buckets that few blocks do not fill,
    costs a whole plan. A slope between one block and two made 70B on 32 H100 five times as large as it is."""
    config, devices = config_of(stage=stage, recipe=recipe, recompute=recompute), Devices(10**15)
    estimated = Known(config, devices).estimate(config)[1]
    assert 0.8 < estimated / devices.tried(config).peak_bytes < 1.01


@pytest.mark.parametrize(
    ("recipe", "own", "more"),
    [
        ("megatron", "none", ("selective:layernorm", "selective:layernorm,mlp", "full")),
        ("megatron", "selective:layernorm", ("selective:layernorm,mlp", "full")),
        ("megatron", "selective:layernorm,mlp", ("full",)),
        ("fsdp2", "selective:op", ("full:2", "full")),
        ("fsdp2", "selective:layernorm", ("full",)),
        ("deepspeed", "none", ("full",)),
        ("deepspeed", "full", ()),
    ],
)
def test_ever_more_recompute_goes_on_from_where_a_configuration_is(
    recipe: str, own: str, more: tuple[str, ...]
) -> None:
    stage = 1 if recipe == "megatron" else 3
    config = config_of(stage=stage, recipe=recipe, recompute=own, attention="flash")
    assert ever_more_recompute(config) == (own, *more)
