"""Reductions that are under way while backward goes on: bits, bytes, and what computes meanwhile."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from test_prefetch import four_units, in_flight
from test_shapes import assert_same_record, small

from zerosim.cli.main import main
from zerosim.device.events import Event, Kernel, Launch, Wait
from zerosim.parallel.pipeline import SCHEDULES
from zerosim.train.plan import plan
from zerosim.train.run import run

CHOICES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "as the paper": ((0, 1, 2, 3), {}),
    "buckets": ((0, 1), dict(bucket_bytes=3000)),
    "owners": ((1, 2, 3), dict(partition="owner")),
    "all-reduced": ((1, 2), dict(grad_reduction="all_reduce")),
    "rings": ((0, 2), dict(collective="ring")),
    "ddp": ((0,), dict(recipe="ddp")),
    "fsdp2": ((2, 3), dict(recipe="fsdp2")),
    "megatron": ((1,), dict(recipe="megatron")),
}
"""Where what is done meanwhile differs: stages, and settings."""
CASES = [(name, stage) for name, (stages, _) in CHOICES.items() for stage in stages]


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize(("name", "stage"), CASES)
def test_no_bit_changes_and_shapes_leave_the_same_record(name: str, stage: int) -> None:
    settings = dict(ranks=2, layers=1, stage=stage, accumulate=2, dropout=0.1, bucket_bytes=None) | CHOICES[name][1]
    waiting, ours = (run(small(**settings, overlap_reduction=way), keep_events=way) for way in (False, True))
    assert ours.losses == waiting.losses
    assert all((ours.weights[key] == waiting.weights[key]).all() for key in ours.weights)
    assert ours.live_bytes_after == [0, 0]
    assert ours.traffic == waiting.traffic
    if name in ("as the paper", "owners"):
        assert_same_record(ours.config, ours)


UNITS = ["wte", "wpe", "h.0", "h.1", "h.2", "ln_f", "lm_head"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("stage", "op"), [(0, "all_reduce"), (1, "reduce_scatter"), (2, "reduce_scatter")])
def test_what_computes_while_a_gradient_is_reduced(stage: int, op: str) -> None:
    """Stages 0 and 1: all that follows in backward. Stage 2: the unit that follows."""
    settings = dict(steps=1, stage=stage, layers=3, bucket_bytes=None, tie_embeddings=False)
    found = in_flight(run(small(**settings, overlap_reduction=True), keep_events=True).events[0], op)
    found = [one for one in found if one[1]]  # not the norm's
    back = UNITS[::-1]
    following = {unit: set(back[at + 1 :]) if stage < 2 else {back[at + 1]} for at, unit in enumerate(back[:-1])}
    assert {unit: computed for _, unit, computed in found} == following
    assert not [one for one in in_flight(run(small(**settings), keep_events=True).events[0], op) if one[1]]


HYBRIDS: dict[str, dict[str, Any]] = {
    "slices": dict(stage=2),
    "owners": dict(stage=2, partition="owner"),
    "gathered": dict(stage=3, prefetch=1, tie_embeddings=False),
    "by module": dict(stage=3, gather="module"),
    "out of buffers": dict(stage=2, reduce_bucket=1000, layers=6),
    "rings": dict(stage=3, collective="ring"),
    "pipeline": dict(stage=2, ranks=8, pp=2, pipeline="zb-v", layers=4),
    "scaled": dict(stage=3, precision="fp16", recipe="fsdp2", replica_reduction="step"),
}


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize("name", HYBRIDS)
def test_replicas_average_while_backward_goes_on(name: str) -> None:
    """In the last backward alone, each own part once: the same bits, bytes and calls as after it."""
    settings = dict(ranks=4, dp_replicate=2, accumulate=4, layers=3) | HYBRIDS[name]
    after, ours = (run(small(**settings, overlap=overlap), keep_events=True) for overlap in ("none", "reduce"))
    assert ours.losses == after.losses
    assert all((ours.weights[key] == after.weights[key]).all() for key in ours.weights)
    assert ours.traffic == after.traffic
    assert set(ours.live_bytes_after) == {0}
    computed = [[averaging(events) for events in result.events] for result in (after, ours)]
    assert not any(any(of_rank) for of_rank in computed[0])
    assert all(len(of_rank) == len(waited) for of_rank, waited in zip(*computed, strict=True))
    assert all(sum(of_rank) >= 2 for of_rank in computed[1])  # in two steps
    assert_same_record(ours.config, ours)


def averaging(events: list[Event]) -> list[bool]:
    """Of each average over replicas, whether backward's products run meanwhile; it is in the last microbatch."""
    found, since = [], dict[int, int]()
    for event in events:
        if isinstance(event, Launch) and event.axis == "dp_replicate" and event.purpose == "states":
            assert event.scope.slot in (0, 3)
            since[event.work] = 0
        elif isinstance(event, Kernel) and event.engine == "matmul":
            since = {work: count + 1 for work, count in since.items()}
        elif isinstance(event, Wait) and event.work in since:
            found.append(since.pop(event.work) > 0)
    return found


def test_what_it_holds_is_one_more_gradient_or_nothing() -> None:
    """Units of 2,000 B on four ranks. In backward of the last one the slices of those before are there."""
    peaks = {
        (stage, overlap): four_units(stage=stage, overlap_reduction=overlap).memory[0].peak.by_kind
        for stage in range(4)
        for overlap in (False, True)
    }
    assert all(peaks[stage, True] == peaks[stage, False] for stage in (0, 1))
    grads = {case: (kinds["unsharded_grad"], kinds["grad"]) for case, kinds in peaks.items() if case[0] > 1}
    assert [grads[stage, False] for stage in (2, 3)] == [(2000, 4 * 500), (2000, 3 * 500)]
    assert [grads[stage, True] for stage in (2, 3)] == [(2 * 2000, 3 * 500), (2 * 2000, 3 * 500)]


WAYS: dict[str, dict[str, Any]] = {
    "all-reduced": dict(stage=0, bucket_bytes=3000),
    "slices": dict(stage=1, bucket_bytes=3000),
    "owners": dict(stage=1, bucket_bytes=3000, partition="owner"),
    "out of a buffer": dict(stage=1, reduce_bucket=1000),
}


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", WAYS)
def test_a_pipeline_drains_before_it_reduces_unless_reductions_overlap(way: str, schedule: str) -> None:
    """No reduction comes before the last input gradient has arrived. Inside the last backward, those of a stage come
    before it is sent. A zero-bubble schedule sends it before the blocks make their weights' gradients; the head makes
    its own at once."""
    settings = dict(ranks=4, pp=2, layers=4, accumulate=4, pipeline=schedule, tie_embeddings=False, **WAYS[way])
    drained, within = (run(small(**settings, overlap=overlap), keep_events=True) for overlap in ("none", "reduce"))
    for result in (drained, within):
        for events in result.events:
            for step in (0, 1):
                sent, reduced = last_sent_and_reduced([event for event in events if event.scope.step == step])
                assert reduced
                if result is drained or sent < 0:
                    assert sent < min(reduced)
                elif schedule.startswith("zb"):
                    assert reductions_of_blocks_follow_the_last_send(events, step)
                else:
                    assert min(reduced) < sent
    assert drained.losses == within.losses
    assert all((drained.weights[key] == within.weights[key]).all() for key in drained.weights)
    assert [sorted(rows) for rows in drained.traffic] == [sorted(rows) for rows in within.traffic]


def reductions_of_blocks_follow_the_last_send(events: list[Event], step: int) -> bool:
    launches = [event for event in events if isinstance(event, Launch) and event.scope.step == step]
    of_backward = [event for event in launches if event.scope.phase == "backward"]
    last = max(at for at, event in enumerate(of_backward) if event.op == "send")
    before = [event.scope.unit for event in of_backward[:last] if event.axis == "dp_shard"]
    return not any(unit.startswith("h.") for unit in before)


def last_sent_and_reduced(events: list[Event]) -> tuple[int, list[int]]:
    """Where a step's last input gradient has arrived (-1: none is sent), and where its reductions are launched."""
    of_backward = [(at, event) for at, event in enumerate(events) if event.scope.phase == "backward"]
    launches = [(at, event) for at, event in of_backward if isinstance(event, Launch)]
    sends = {event.work for _, event in launches if event.op == "send"}
    arrived = [at for at, event in of_backward if isinstance(event, Wait) and event.work in sends]
    return max(arrived, default=-1), [at for at, event in launches if event.axis == "dp_shard"]


def test_out_of_buffers_it_is_two_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--stage", "2", "--reduce-bucket", "1000", "--overlap-reduction"]) == 2
    assert "choose reduce_buffers 2 to overlap" in capsys.readouterr().err


def test_a_bucket_leaves_as_soon_as_no_more_fits() -> None:
    """One call per unit: each is reduced where it was made, not a unit later."""
    events = plan(small(steps=1, stage=0, layers=3, bucket_bytes=None), keep_events=True).events[0]
    units = [event.scope.unit for event in events if getattr(event, "op", "") == "all_reduce" and event.scope.unit]
    assert units == UNITS[::-1][1:]  # the head is the table
    assert all(one != other for one, other in pairwise(units))
