"""Runs and plans under each allocator: the same numbers, the same record on shapes, and what ZeRO says of MD."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.config import RunConfig, plan_config
from zerosim.device.allocators.caching import CachingAllocator
from zerosim.device.allocators.choose import make_allocator
from zerosim.device.events import Alloc, Free, Move, Refusal
from zerosim.errors import InputError, OutOfMemory
from zerosim.ledger.allocator import AllocatorLedger, replayed
from zerosim.train.plan import peak_within, plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

CACHING = ("caching", None, None)
EXPANDABLE = ("caching", "expandable_segments:True", None)
ARENA = ("arena", None, 2**24)
ALLOCATORS = pytest.mark.parametrize(("allocator", "conf", "capacity"), [CACHING, EXPANDABLE, ARENA])


def small(**changes: Any) -> RunConfig:
    """A GPT in which every kind of buffer comes and goes."""
    values = {"stage": 2, "ranks": 2, "layers": 3, "hidden": 32, "heads": 4, "seq": 32, "steps": 2, "micro_batch": 2}
    return RunConfig(**{**values, "recompute": "full", "attention": "flash", **changes})


@pytest.mark.quick(1)
@ALLOCATORS
def test_numbers_and_live_bytes_are_those_of_exact(allocator: str, conf: str | None, capacity: int | None) -> None:
    exact = run(small())
    result = run(small(allocator=allocator, allocator_conf=conf, capacity=capacity))
    assert result.losses == exact.losses
    assert all(np.array_equal(result.weights[name], exact.weights[name]) for name in exact.weights)
    for one, other in zip(result.memory, exact.memory, strict=True):
        assert (one.peak, one.marks) == (other.peak, other.marks)
        held = one.allocator
        assert held is not None
        assert held.reserved_bytes >= held.allocated_bytes >= held.requested_bytes == other.peak.total_bytes
    assert exact.memory[0].allocator is None
    assert result.live_bytes_after == [0, 0]


@ALLOCATORS
def test_shapes_leave_the_same_record(allocator: str, conf: str | None, capacity: int | None) -> None:
    config = small(allocator=allocator, allocator_conf=conf, capacity=capacity)
    real, shapes = run(config, keep_events=True), plan(config, every_rank=True, keep_events=True)
    assert real.memory == shapes.memory
    assert real.events == shapes.events


@ALLOCATORS
def test_a_finished_record_is_read_by_the_same_class(allocator: str, conf: str | None, capacity: int | None) -> None:
    config = small(allocator=allocator, allocator_conf=conf, capacity=capacity)
    exact, there = plan(small(), keep_events=True), plan(config, keep_events=True)
    for has in (exact, there):
        events = list(replayed(has.events[0], make_allocator(allocator, capacity, conf)))
        assert events == there.events[0]
        ledger = AllocatorLedger()
        ledger.read(events)
        assert ledger.peaks == there.memory[0].allocator


BESIDE: list[dict[str, Any]] = [
    dict(stage=1, accumulate=8),
    dict(stage=3, recipe="fsdp2", accumulate=2),
    dict(stage=2, accumulate=8, steps=3, optimizer="muon"),
    dict(ranks=4, pp=2, stage=1, accumulate=12),
    dict(ranks=4, pp=2, stage=0, accumulate=12, pipeline="gpipe", steps=2),
    dict(ranks=4, pp=2, stage=1, accumulate=12, pipeline="zb-h1"),
    dict(ranks=4, pp=2, stage=1, accumulate=16, pipeline="interleaved", virtual_stages=2),
    dict(stage=1, accumulate=9, offload="optimizer=host", recipe="deepspeed"),
    dict(stage=1, accumulate=8, paged_states=True, hidden=256),
]


def of_allocators(result: RunResult) -> object:
    return result.to_dict(), [(rank.allocator, dict(rank.allocator_marks)) for rank in result.memory], result.traffic


@pytest.mark.quick(2)
@pytest.mark.parametrize(("allocator", "conf", "capacity"), [CACHING, EXPANDABLE])
@pytest.mark.parametrize("fields", BESIDE, ids=str)
def test_requests_served_beside_a_plan_take_what_they_take_on_its_devices(
    fields: dict[str, Any], allocator: str, conf: str | None, capacity: int | None
) -> None:
    """With events, the devices have the allocator and run all microbatches. Then with too little for the peak."""
    config = small(**{"layers": 4, **fields}).replace(allocator=allocator, allocator_conf=conf, capacity=capacity)
    beside, there = plan(config), plan(config, keep_events=True)
    assert of_allocators(beside) == of_allocators(there)
    assert (beside.extended_from is None) == (fields["accumulate"] == 2 or "paged_states" in fields)
    most = max(one.reserved_bytes for one in there.memory)
    live = max(one.peak.total_bytes for one in there.memory)
    for limit in (most, live, live - 1):
        tight, ends = config.replace(capacity=limit), list[object]()
        for keep in (False, True):
            try:
                ends.append(of_allocators(plan(tight, keep_events=keep)))
            except OutOfMemory as error:
                ends.append((str(error), error.room, error.live, error.by_unit))
        assert ends[0] == ends[1]


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_long_and_short_lived_bytes_fragment_an_arena_and_md_mends_it(stage: int) -> None:
    """ZeRO, sections 3.2 and 6.3. The arena holds exactly what is live at the peak, not a byte more."""
    config = small(stage=stage, steps=1, layers=6, hidden=64, seq=64)
    exact = run(config)
    peak = max(memory.peak.total_bytes for memory in exact.memory)
    arena = config.replace(allocator="arena", capacity=peak)
    with pytest.raises(OutOfMemory, match="the largest hole") as caught:
        run(arena.replace(allocator_conf="defragment:False"))
    room = caught.value.room
    assert room is not None
    assert room.largest_hole < caught.value.requested <= room.free_bytes  # enough in all, but not in one place
    assert sum(caught.value.live.values()) == peak - room.free_bytes == sum(caught.value.by_unit.values())
    defragmented = run(arena, keep_events=True)
    assert defragmented.losses == exact.losses
    assert all(np.array_equal(defragmented.weights[name], exact.weights[name]) for name in exact.weights)
    held = defragmented.memory[0].allocator
    assert held is not None
    moves = [event for event in defragmented.events[0] if isinstance(event, Move)]
    assert held.moved_bytes == sum(move.nbytes for move in moves) > 0


def test_expandable_segments_fit_where_segments_do_not() -> None:
    plain = plan_config(model="gpt2", ranks=8, stage=3, allocator="caching")
    expandable = plain.replace(allocator_conf="expandable_segments:True")
    most, less = (plan(one).memory[0].reserved_bytes for one in (plain, expandable))
    assert less < most
    with pytest.raises(OutOfMemory) as caught:
        plan(plain.replace(capacity=less))
    assert caught.value.room is not None
    assert "expandable_segments:True" in caught.value.room.remedy
    assert plan(expandable.replace(capacity=less)).memory[0].reserved_bytes <= less
    assert sum(peak_within(plain, None).values()) == most
    assert sum(peak_within(plain, less).values()) > less >= sum(peak_within(expandable, less).values())


def test_a_record_that_does_not_fit_ends_with_a_refusal() -> None:
    events = plan(small(), keep_events=True).events[0]
    *before, last = replayed(events, CachingAllocator(2**20))
    assert isinstance(last, Refusal)
    assert len([event for event in before if isinstance(event, (Alloc, Free))]) < len(events)


def test_knobs_want_their_allocator_and_an_arena_a_size() -> None:
    with pytest.raises(InputError, match="allocator_conf"):
        small(allocator_conf="expandable_segments:True")
    with pytest.raises(InputError, match="defragment"):
        small(allocator="caching", allocator_conf="defragment:True")
    with pytest.raises(InputError, match="--capacity"):
        plan(small(allocator="arena"))


def test_json_has_the_allocators_peaks() -> None:
    memory = plan(small(allocator="caching")).to_dict()["ranks"][0]["memory"]
    exact = plan(small()).to_dict()["ranks"][0]["memory"]
    assert memory["peak"]["bytes"] == exact["peak"]["bytes"] <= memory["peak"]["allocated_bytes"]
    assert memory["peak"]["allocated_bytes"] <= memory["peak"]["reserved_bytes"]
    assert set(memory) - set(exact) == {"allocator"}
    assert set(memory["peak"]) - set(exact["peak"]) == {"allocated_bytes", "reserved_bytes"}


@pytest.mark.parametrize("allocator", ["caching", "arena"])
def test_json_has_what_the_allocator_held_at_each_mark(allocator: str) -> None:
    """Whole blocks, and never more than at the peak. Under exact it is what the kinds add up to."""
    memory = plan(plan_config(model="gpt", layers=2, stage=1, ranks=2, capacity=2**30, allocator=allocator)).memory[0]
    values = memory.to_dict()
    marks = values["allocator"]["marks"]
    assert list(marks) == ["after_init", "end_of_forward", "end_of_backward", "after_step"]
    for mark, held in marks.items():
        live = sum(values[mark].values())
        assert live <= held["allocated_bytes"] <= values["peak"]["allocated_bytes"]
        assert held["allocated_bytes"] <= held["reserved_bytes"] <= values["peak"]["reserved_bytes"]
        if allocator == "caching":
            assert held["allocated_bytes"] % 512 == 0
            assert held["reserved_bytes"] % (2 * 2**20) == 0
            assert live < held["allocated_bytes"]
