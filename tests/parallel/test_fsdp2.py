"""FSDP2 as it is: replicas averaged in every microbatch, pure bf16, adapters cut along dimension 0."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from same import assert_same_weights

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.config import RunConfig, plan_config
from zerosim.device.events import Alloc, Free, Launch
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


LLAMA3 = dict(model="llama3-8b", recipe="fsdp2", lora_rank=16, adapter_dtype="fp32", optimizer="adamw", stage=3, seq=64)


@pytest.mark.parametrize(
    ("ranks", "first", "rest", "sent"),
    [(64, 303_104, 40_960, 606_208), (512, 267_264, 5_120, 4_276_224)],
)
def test_adapters_are_cut_along_dimension_0_and_padded_to_a_row_on_every_rank(
    ranks: int, first: int, rest: int, sent: int
) -> None:
    """Run with fully_shard on a fake process group, by Llama 3 8B's shapes: q and v of 32 blocks, of rank 16."""
    result = plan(plan_config(**LLAMA3, ranks=ranks), keep_events=True)
    moments = [memory.marks["after_step"].by_kind["optim"] for memory in result.memory]
    assert moments == [8 * first] * 16 + [8 * rest] * (ranks - 16)
    block = [
        e for e in result.events[0] if isinstance(e, Launch) and e.op == "reduce_scatter" and e.scope.unit == "layers.1"
    ]
    assert sum(e.payload_bytes for e in block) == 4 * sent
    assert formulas_agree(checks(result))


def most_at_the_loss(config: RunConfig, phase: str) -> int:
    """Return the most bytes that are live while the loss computes in a phase of the first step."""
    live, highest, sizes = 0, 0, dict[int, int]()
    for event in plan(config, keep_events=True).events[0]:
        if isinstance(event, Alloc):
            sizes[event.id] = event.nbytes
            live += event.nbytes
            if event.scope[:3] == (0, phase, "loss"):
                highest = max(highest, live)
        elif isinstance(event, Free):
            live -= sizes.pop(event.id)
    return highest


def test_the_last_blocks_output_stays_beside_a_loss_in_the_model() -> None:
    """Until the root's forward ends. A loss that the trainer computes comes after that."""
    config = RunConfig(**FSDP2, loss="hf-5", accumulate=2)
    without = config.replace(keep_last_output=False)
    block = 2 * (12 * 16 * 16 + 13 * 16)
    assert most_at_the_loss(config, "forward") - most_at_the_loss(without, "forward") == block
    assert most_at_the_loss(config, "backward") == most_at_the_loss(without, "backward")
    late = config.replace(prefetch=0)
    assert most_at_the_loss(config, "backward") - most_at_the_loss(late, "backward") == block  # the root's backward
    outside = config.replace(loss="torch")
    assert most_at_the_loss(outside, "forward") == most_at_the_loss(outside.replace(keep_last_output=False), "forward")
    result = run(config)
    assert_same_weights(result, run(without))
    assert result.live_bytes_after == [0] * 4


def test_adapters_that_some_ranks_lack_move_unevenly() -> None:
    """Of rank 1 an A has one row, on one of four ranks: only that one copies its states."""
    where = "optimizer=nvme,params=nvme"
    result = plan(RunConfig(**FSDP2, lora_rank=1, adapter_dtype="fp32", optimizer="adamw", offload=where))
    assert formulas_agree(checks(result))
    moved = {sum(row.payload_bytes for row in rank if row.op == "host to nvme") for rank in result.traffic}
    assert len(moved) > 1
