"""Blocks that are declared like the first of their kind: the same weights in the same buffers, and no layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from zerosim.comm.runtime import make_backend
from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.nn import Unit
from zerosim.placement.spec import FlatSpec
from zerosim.train.build_model import build_model

SMALL = {"layers": 4, "hidden": 16, "heads": 4, "vocab": 32, "seq": 8}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gpt": {"model": "gpt", **SMALL},
    "tensor parallel": {"model": "llama", **SMALL, "ranks": 2, "tp": 2},
    "leaves": {"model": "gpt", **SMALL, "stage": 3, "gather": "module"},
    "tiles": {"model": "gpt", **SMALL, "stage": 3, "gather": "module", "tiles": 2},
    "blocks of an optimizer": {"model": "gpt", **SMALL, "optimizer": "adam8bit"},
    "experts over ranks": {"model": "mixtral-8x7b", "ranks": 2, "ep": 2},
    "dense blocks before experts": {"model": "deepseek-v3", "layers": 6},
    "two stacks": {"model": "t5-small"},
    "adapters": {"model": "llama", **SMALL, "lora_rank": 2},
}


def buffers(unit: Unit) -> list[tuple[str, object, list[FlatSpec]]]:
    """Return each unit's and leaf's name, branches and buffers."""
    return [(one.name, one.branches, [flat.spec for flat in one.flats]) for one in (unit, *unit.leaves)]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_block_like_another_one_has_its_own_weights_in_their_places(name: str) -> None:
    config, device = RunConfig(**CONFIGS[name]), Device(0, make_backend("meta"))
    built, declared = (build_model(config, device, builds_all=each) for each in (True, False))
    assert [buffers(unit) for unit in declared.units] == [buffers(unit) for unit in built.units]
    assert declared.shapes() == built.shapes()
    assert len({id(flat.collector) for flat in declared.flats}) == len(declared.flats)


def test_only_the_first_block_of_a_kind_can_run() -> None:
    model = build_model(RunConfig(**CONFIGS["gpt"]), Device(0, make_backend("meta")), builds_all=False)
    first, second = (next(unit for unit in model.units if unit.name == name) for name in ("h.0", "h.1"))
    assert first.function is not second.function
    with pytest.raises(AssertionError, match="has no layers"):
        second.function(None)  # type: ignore[arg-type]
