"""The optimizer in backward: the bits of a step after it, the gradients of one buffer at a time, no norm."""

from __future__ import annotations

from typing import Any

import pytest
from same import assert_same_bits
from test_shapes import assert_same_record

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.config import RunConfig
from zerosim.device.events import Alloc, Event, Free, Kernel, Retag
from zerosim.errors import InputError
from zerosim.optim.sophia import SophiaG
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(ranks=2, steps=2, micro_batch=1, layers=4, hidden=16, heads=2, seq=8)
GRADS = ("grad", "unsharded_grad")


def most_gradients(events: list[Event]) -> int:
    """The most bytes of gradients that live at once."""
    sizes, live, most = dict[int, int](), dict[int, int](), 0
    for event in events:
        if isinstance(event, Alloc):
            sizes[event.id] = event.nbytes
        if isinstance(event, Alloc | Retag) and event.kind in GRADS:
            live[event.id] = sizes[event.id]
        elif isinstance(event, Free | Retag):
            live.pop(event.id, None)
        most = max(most, sum(live.values()))
    return most


@pytest.mark.bits
@pytest.mark.quick(4)
@pytest.mark.parametrize(
    "fields",
    [
        dict(stage=0, precision="fp32"),
        dict(stage=1, optimizer="adam8bit"),
        dict(stage=3, recipe="fsdp2", lora_rank=2, base="nf4"),
        dict(stage=3, ranks=3, partition="owner", optimizer="muon"),
        dict(stage=0, recipe="ddp"),
        dict(stage=1, ranks=3, overlap_param_gather=True, overlap_reduction=True),
        dict(stage=2, recipe="deepspeed", precision="fp32", clip_norm=0),
        dict(stage=2, optimizer="adafactor", foreach=True),
        dict(stage=2, precision="bf16-pure", rounding="stochastic"),
        dict(stage=3, ranks=3, recipe="deepspeed", persistent_grads=False, clip_norm=0),
        dict(stage=3, recipe="fsdp2", recompute="full"),
        dict(stage=3, prefetch=2, model="llama", optimizer="lion", tie_embeddings=False),
        dict(stage=3, offload="params=host", gather="module"),
    ],
    ids=str,
)
def test_it_has_the_bits_of_a_step_after_backward(fields: dict[str, Any]) -> None:
    config = RunConfig(**SMALL | fields, optimizer_in_backward=True)
    result = run(config, keep_events=True)
    assert_same_bits(result, run(config.replace(optimizer_in_backward=None)))
    assert_same_record(config, result)
    assert formulas_agree(checks(result))
    assert {report.grad_norm for report in result.steps} == {None}
    assert set(result.live_bytes_after) == {0}


def test_states_that_the_first_step_makes_are_there_when_backward_ends() -> None:
    result = run(RunConfig(**SMALL | {"steps": 1}, lazy_states=True, optimizer_in_backward=True))
    assert formulas_agree(checks(result))
    assert result.memory[0].marks["end_of_backward"].by_kind["optim"] > 0


@pytest.mark.parametrize("stage", range(4))
def test_no_rank_holds_gradients_of_more_than_one_buffer(stage: int) -> None:
    config = RunConfig(**SMALL, stage=stage, bucket_bytes=None, tie_embeddings=False)
    late, early = (run(one, keep_events=True) for one in (config, config.replace(optimizer_in_backward=True)))
    largest = max(flat.numel for flat in early.layout.flats.values())
    assert most_gradients(early.events[0]) <= 2 * (largest + largest // 2)  # whole in bf16, and its local shard
    assert most_gradients(late.events[0]) > most_gradients(early.events[0])
    assert early.memory[0].marks["end_of_backward"].by_kind.get("grad", 0) == 0
    updates = [event for event in early.events[0] if isinstance(event, Kernel) and event.scope.phase == "optimizer"]
    assert {event.scope.unit for event in updates} > {"h.0", "h.1", "h.2"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(clip_norm=1.0), "the norm of all gradients is known only after backward"),
        (dict(skip_nonfinite=True), "known only after backward"),
        (dict(precision="fp16"), "finds an overflow only after backward"),
        (dict(accumulate=2), "the sum of 2 backwards"),
        (dict(tp=2), "with tp 2"),
        (dict(pp=2, accumulate=2), "with pp 2"),
        (dict(pp=2, accumulate=2, pipeline="zb-h1"), "with pp 2"),
        (dict(ranks=4, dp_replicate=2), "with dp_replicate 2"),
        (dict(offload="optimizer=host"), "lets the CPU step after backward"),
        (dict(offload="optimizer=host", delayed_update=1), "keeps all gradients for the next step"),
        (dict(persistent_grads=True), "each gradient is freed"),
        (dict(stage=0, grad_buckets="views"), "hold gradients for the whole run"),
        (dict(optimizer="sophia"), "a second backward"),
    ],
    ids=str,
)
def test_what_needs_all_gradients_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        RunConfig(**{**SMALL, "stage": 2, **fields}, optimizer_in_backward=True)
    assert "\n" not in str(error.value)


def test_an_optimizer_of_ones_own_that_estimates_is_refused() -> None:
    with pytest.raises(InputError, match="SophiaG estimates from a second backward"):
        run(RunConfig(**SMALL, optimizer_in_backward=True), optimizer=SophiaG(64))
