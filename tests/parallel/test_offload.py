"""Offloaded model states: no bit changes, shapes leave the record of a run, bytes and copies are the closed forms'."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zerosim
from zerosim.analysis.checks import checks
from zerosim.config import RunConfig, plan_config
from zerosim.device.events import COMPUTE, CPU, Alloc, Copy, Event, Free, Kernel, Wait
from zerosim.errors import InputError, OutOfMemory
from zerosim.placement.memories import DEVICE, HOST, NVME
from zerosim.report.plots.by_stage import memory_bars
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

SMALL: dict[str, Any] = dict(ranks=2, steps=2, accumulate=2, micro_batch=1, layers=2, hidden=16, heads=2, seq=8)
INFINITY = "optimizer=nvme,params=nvme"
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("optimizer=host", dict(stage=stage, precision=one)) for stage in (1, 2, 3) for one in ("bf16", "fp16", "fp32")),
    *((INFINITY, dict(stage=3, precision=one)) for one in ("bf16", "fp16", "fp32")),
    ("params=host", dict(stage=3)),
    ("optimizer=host,params=host", dict(stage=3, prefetch=1)),
    (INFINITY, dict(stage=3, prefetch=1, ranks=3)),
    ("params=nvme", dict(stage=3, optimizer="lion")),
    ("optimizer=host,params=nvme", dict(stage=3)),
    ("optimizer=nvme,params=host,grads=host", dict(stage=3)),
    ("optimizer=nvme", dict(stage=2)),
    (INFINITY, dict(stage=3, recipe="deepspeed")),
    (INFINITY, dict(stage=3, recipe="fsdp2")),
    ("optimizer=host,params=host", dict(stage=3, recipe="fsdp2")),
    ("optimizer=host,params=host", dict(stage=3, recipe="fsdp2", precision="fp16", accumulate=1, clip_norm=0.1)),
    (INFINITY, dict(stage=3, gather="module")),
    (INFINITY, dict(stage=3, lora_rank=4)),
    ("optimizer=host", dict(stage=1, recipe="megatron")),
    ("optimizer=host", dict(stage=2, recipe="deepspeed")),
    ("optimizer=host,params=host", dict(stage=3, partition="owner")),
    ("optimizer=host,params=host", dict(stage=3, ranks=4, dp_replicate=2)),
    ("optimizer=host,params=host", dict(stage=3, ranks=4, tp=2, sequence_parallel=True)),
    ("optimizer=host", dict(stage=1, ranks=4, pp=2)),
    ("optimizer=host,params=host", dict(stage=3, ranks=4, secondary_shard=2)),
    ("optimizer=host,grads=host", dict(stage=3, ranks=4, secondary_shard=2)),
    ("optimizer=host", dict(stage=3, grad_sync=False)),
    ("optimizer=host", dict(stage=2, cpu_checkpointing=True, recompute="full")),
]


def assert_alike(one: RunResult, other: RunResult) -> None:
    assert one.losses == other.losses
    assert one.weights.keys() == other.weights.keys()
    assert all(np.array_equal(one.weights[name], other.weights[name]) for name in one.weights)


def assert_forms(result: RunResult) -> None:
    """Bytes of each memory, and what moved between them in the last step."""
    for stage in range(result.layout.mesh.pp):
        assert [check.agrees for check in checks(result)[stage].states] == [True] * 4
        found = [*checks(result)[stage].memories, *checks(result, result.config.optim.steps - 1)[stage].copied]
        assert all(check.agrees is not False for check in found), [c for c in found if c.agrees is False]


@pytest.mark.bits
@pytest.mark.quick(1)
@pytest.mark.parametrize(("offload", "fields"), CASES, ids=str)
def test_no_bit_changes_and_shapes_leave_the_record(offload: str, fields: dict[str, Any], tmp_path: Path) -> None:
    config = RunConfig(**SMALL | fields)
    away = config.replace(offload=offload, nvme=str(tmp_path))
    result, planned = run(away, keep_events=True), plan(away, keep_events=True, every_rank=True)
    assert_alike(run(config), result)
    assert result.events == planned.events
    assert result.live_bytes_after == [0] * config.mesh.ranks
    assert not list(tmp_path.iterdir())
    assert_forms(result)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_offload_moves_2_psi_over_n_each_way(stage: int) -> None:
    """2M/N bytes of gradients out, 2M/N of parameters back (ZeRO-Offload, section 4), and 14M/N on the host."""
    result = plan(plan_config(**SMALL | dict(stage=stage, ranks=4, accumulate=1, steps=1), offload="optimizer=host"))
    psi, memory = sum(flat.numel for flat in result.layout.flats.values()), result.memory[0]
    padded = sum(result.layout.padded(name) for name in result.layout.flats)
    assert psi == padded
    moved = {row.op: row.payload_bytes for row in result.traffic[0] if row.purpose == "offload"}
    assert moved == {"device to host": 2 * psi // 4, "host to device": 2 * psi // 4}
    host = memory.others[HOST].marks["end_of_backward"].by_kind
    assert host == {"optim": 12 * psi // 4, "grad": 2 * psi // 4}
    assert "optim" not in memory.marks["end_of_backward"].by_kind
    assert memory.states == {} or sum(memory.states.values()) == 12 * psi // 4


def test_the_cpu_steps_and_the_device_does_nothing_there() -> None:
    result = plan(
        plan_config(**SMALL | dict(stage=2, steps=1, accumulate=1), offload="optimizer=host"), keep_events=True
    )
    kernels = [event for event in result.events[0] if isinstance(event, Kernel)]
    assert {kernel.place for kernel in kernels if kernel.name == "adam"} == {HOST}
    assert all(kernel.place == DEVICE for kernel in kernels if kernel.scope.phase in ("forward", "backward"))


def test_gradients_leave_as_backward_goes() -> None:
    """Of own parts that were reduced one is on the device beside the one that arrives."""
    result = plan(plan_config(**SMALL | dict(stage=2, steps=1, accumulate=1), offload="optimizer=host"))
    own = max(flat.numel for flat in result.layout.flats.values()) // 2
    assert result.memory[0].peak.by_kind.get("grad", 0) <= 2 * 2 * own
    backward = [row for row in result.traffic[0] if row.op == "device to host" and row.purpose == "offload"]
    assert {row.phase for row in backward} == {"backward"}


def test_every_rank_brings_its_own_part_an_owner_brings_all() -> None:
    """Bandwidth-centric partitioning (ZeRO-Infinity, section 6.1): N links bring 1/N each, instead of one all of it."""
    brought = {}
    for partition in ("slices", "owner"):
        fields = SMALL | dict(stage=3, steps=1, ranks=4, partition=partition, tie_embeddings=False)
        result = plan(plan_config(**fields, offload="params=host"), keep_events=True, every_rank=True)
        brought[partition] = [
            {event.scope.unit: event.nbytes for event in events if isinstance(event, Copy) and event.target == DEVICE}
            for events in result.events
        ]
    for unit in brought["slices"][0]:
        slices, owner = ([one.get(unit, 0) for one in brought[how]] for how in ("slices", "owner"))
        assert len(set(slices)) == 1
        assert sorted(owner)[:3] == [0, 0, 0]
        assert max(owner) <= sum(slices)


def test_three_tiles_of_states_are_on_the_host_at_most() -> None:
    """One is read while one is stepped and one is written, 12 bytes a parameter; and gradients of 2."""
    fields = SMALL | dict(stage=3, steps=1, layers=6, accumulate=1)
    result = plan(plan_config(**fields, offload="optimizer=nvme,params=nvme"), keep_events=True)
    tile = max(flat.numel for flat in result.layout.flats.values()) // 2
    peak = result.memory[0].others[HOST].peak.by_kind
    assert tile * 12 < peak["optim"] <= 3 * 12 * tile
    assert peak.get("grad", 0) <= 3 * 2 * tile


def with_copies_in_flight(events: Iterable[Event], waiter: str) -> Iterator[tuple[Event, list[Copy]]]:
    """Yield each event, and the copies before it for which the waiter has not waited."""
    flying: dict[int | None, Copy] = {}
    for event in events:
        yield event, list(flying.values())
        if isinstance(event, Copy) and event.purpose == "offload":
            flying[event.work] = event
        elif isinstance(event, Wait) and event.by == waiter:
            flying.pop(event.work, None)


def test_beside_a_tile_that_steps_the_next_is_read_and_the_one_before_is_written() -> None:
    """A tile's write waits for the one before: files of two tiles are never written at the same time."""
    fields = SMALL | dict(stage=1, steps=1, layers=6, accumulate=1)
    result = plan(plan_config(**fields, offload="optimizer=nvme"), keep_events=True)
    beside, tiles = [], [*result.layout.flats]
    step = [event for event in result.events[0] if event.scope.phase == "optimizer"]
    for event, copies in with_copies_in_flight(step, CPU):
        writes = {copy.scope.unit for copy in copies if copy.target == NVME}
        if isinstance(event, Kernel) and event.name == "adam":
            beside.append(({copy.scope.unit for copy in copies if copy.source == NVME}, writes))
        elif isinstance(event, Copy) and event.target == NVME:
            assert writes <= {event.scope.unit}
    before, after = [set(), *({tile} for tile in tiles)], [*({tile} for tile in tiles[1:]), set()]
    assert beside == list(zip(after, before[:-1], strict=True))


@pytest.mark.parametrize("offload", ["optimizer=host", INFINITY])
def test_one_gradient_leaves_while_backward_goes_on(offload: str) -> None:
    fields = SMALL | dict(stage=3, steps=1, layers=6)
    result = plan(plan_config(**fields, offload=offload), keep_events=True)
    leaving = {
        sum(copy.source == DEVICE for copy in copies)
        for event, copies in with_copies_in_flight(result.events[0], COMPUTE)
        if isinstance(event, Kernel) and event.scope.phase == "backward" and event.place == DEVICE
    }
    assert leaving == {0, 1}


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_gather_brings_its_parameters_once(prefetch: int) -> None:
    fields = SMALL | dict(stage=3, steps=1, layers=6, accumulate=1, prefetch=prefetch)
    result = plan(plan_config(**fields, offload="params=nvme"), keep_events=True)
    rows = [row for row in result.traffic[0] if row.phase in ("forward", "backward")]
    times = {
        op: sum(row.calls for row in rows if row.op == op) for op in ("all_gather", "nvme to host", "host to device")
    }
    assert set(times.values()) == {2 * (len(result.layout.flats) + 1)}  # the tied table is used twice


@pytest.mark.parametrize("recipe", ["paper", "fsdp2", "deepspeed"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("offload", ["optimizer=host,params=host", INFINITY])
def test_a_shard_is_copied_into_its_place_in_the_gathered_buffer(offload: str, ranks: int, recipe: str) -> None:
    """Nothing waits beside the gathered and prefetched units (DeepSpeed 0.19, PyTorch 2.13)."""
    fields = SMALL | dict(stage=3, steps=1, layers=6, ranks=ranks, recipe=recipe, persistent_numel=0)
    events = plan(plan_config(**fields, prefetch=3, prefetch_elements=0, offload=offload), keep_events=True).events[0]
    beside = {e.kind for e in events if isinstance(e, Alloc) and e.memory == DEVICE and e.scope.phase == "forward"}
    assert {"prefetched_param"} <= beside
    assert "comm" not in beside


def test_a_shard_that_is_sent_as_codes_is_on_the_device_while_they_are_made() -> None:
    fields = SMALL | dict(stage=3, steps=1, layers=6, ranks=2, accumulate=1, prefetch=3, quantized_weights=True)
    result = plan(plan_config(**fields, offload="params=host,optimizer=host"), keep_events=True)
    live, most, events = set[int](), 0, [e for e in result.events[0] if e.scope.phase in ("forward", "backward")]
    for event, then in pairwise(events):
        if isinstance(event, Alloc) and isinstance(then, Copy) and then.target == DEVICE:
            live.add(event.id)
        elif isinstance(event, Free):
            live.discard(event.id)
        most = max(most, len(live))
    assert most == 1


def test_with_prefetch_the_next_two_shards_are_read_from_the_drive() -> None:
    fields = SMALL | dict(stage=3, steps=1, layers=6, accumulate=1, prefetch=1)
    result = plan(plan_config(**fields, offload=INFINITY), keep_events=True)
    events = result.events[0]
    at = {}
    for number, event in enumerate(events):
        if event.scope.phase == "forward" and getattr(event, "op", "") == "all_gather":
            at["gather", event.scope.unit] = number
        elif isinstance(event, Copy) and event.scope.phase == "forward":
            at.setdefault((event.target, event.nbytes, number), number)
    first = min(number for key, number in at.items() if key[0] == "gather")
    before = [event for event in events[: at["gather", "h.1"]] if isinstance(event, Copy)]
    ways = [(event.source, event.target) for event in before if event.scope.phase == "forward"]
    assert first < at["gather", "h.1"]
    assert ways.count((NVME, HOST)) > ways.count((HOST, DEVICE)) >= 2


def test_files_hold_the_ledgers_bytes(tmp_path: Path) -> None:
    found: list[int] = []

    def progress(rank: int, step: int, loss: float) -> None:
        if rank == 0:
            files = [path for folder in tmp_path.iterdir() for path in folder.glob("rank0-*.bin")]
            found.append(sum(path.stat().st_size for path in files))

    result = run(RunConfig(**SMALL | dict(stage=3, offload=INFINITY, nvme=str(tmp_path))), progress=progress)
    assert found == [result.memory[0].others[NVME].marks["after_step"].total_bytes] * 2


def test_allocs_say_their_memory_and_json_has_each() -> None:
    result = plan(plan_config(**SMALL | dict(stage=3, steps=1), offload=INFINITY), keep_events=True)
    places = {event.memory for event in result.events[0] if isinstance(event, Alloc)}
    assert places == {DEVICE, HOST, NVME}
    memory = result.to_dict()["ranks"][0]["memory"]
    psi = sum(result.layout.padded(name) for name in result.layout.flats)
    assert memory["nvme"]["end_of_backward"] == {"optim": 6 * psi, "param": psi, "grad": psi}
    assert memory["host"]["peak"]["bytes"] == memory["host_peak_bytes"] > 0
    without = plan(plan_config(**SMALL | dict(stage=3, steps=1))).to_dict()["ranks"][0]["memory"]
    assert not without.keys() & {"host", "nvme"}


def test_forms_agree_for_many_micro_batches() -> None:
    for offload in ("optimizer=host", INFINITY):
        fields = SMALL | dict(stage=3, steps=1, accumulate=9, ranks=3, tie_embeddings=False)
        assert_forms(plan(plan_config(**fields, offload=offload)))


def test_paper_bytes_on_the_host() -> None:
    """14M bytes over all ranks (ZeRO-Offload, section 4.1), 16M where gradients are kept in fp32 (DeepSpeed)."""
    for grads, each in (("bf16", 14), ("fp32", 16)):
        fields = SMALL | dict(stage=2, steps=1, accumulate=1, grad_dtype=grads)
        result = plan(plan_config(**fields, offload="optimizer=host"))
        psi = sum(result.layout.padded(name) for name in result.layout.flats)
        assert result.memory[0].others[HOST].marks["end_of_backward"].total_bytes == Fraction(each * psi, 2)


def test_pictures_and_the_stepper_have_a_bar_for_each_memory() -> None:
    config = RunConfig(stage=3, ranks=2, steps=1, layers=2, hidden=16, heads=2, seq=8, offload="optimizer=host")
    result = plan(config)
    device, host = memory_bars({"ZeRO-3 (P_os+g+p)": result})
    assert (device.label, host.label) == ("ZeRO-3 (P_os+g+p)", "ZeRO-3, on the host")
    assert dict(device.parts) == dict(result.memory[0].marks["end_of_backward"].by_kind)
    assert dict(host.parts) == dict(result.memory[0].others["host"].marks["end_of_backward"].by_kind)
    with zerosim.debug(config) as world:
        world.until("end_of_backward", rank=0)
        rank = world.ranks[0]
        assert rank.memories == ["device", "host"]
        assert rank.memory("host").by_kind == result.memory[0].others["host"].marks["end_of_backward"].by_kind
        assert "in its host memory" in rank._repr_html_()


TP_OFFLOADS: list[dict[str, Any]] = [
    dict(stage=1, lora_rank=2, offload="optimizer=nvme"),
    dict(stage=2, model="llama", kv_heads=1, offload="optimizer=host,grads=nvme"),
    dict(stage=3, sequence_parallel=True, offload="optimizer=host", gather="module"),
    dict(stage=3, dp_replicate=2, offload="optimizer=nvme,params=nvme"),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("more", TP_OFFLOADS, ids=str)
def test_a_node_has_room_for_a_run_where_it_has_room_for_its_plan(more: dict[str, Any], tmp_path: Path) -> None:
    """Ranks of tp count unlike parts of the norm, one gradient after the other, and hold as many bytes on the host."""
    config = RunConfig(ranks=8, tp=2, steps=1, micro_batch=1, layers=2, hidden=8, heads=2, seq=2, **more)
    config = config.replace(nvme=str(tmp_path)) if config.offload.uses_nvme else config
    held = [one.host_peak_bytes for one in run(config).memory]
    assert held == [one.host_peak_bytes for one in plan(config).memory]
    for end in (run, plan):
        end(config.replace(host_memory=sum(held)))
        with pytest.raises(OutOfMemory, match="out of host memory"):
            end(config.replace(host_memory=sum(held) - 1))


@pytest.mark.parametrize("times", [1, 2])
def test_cpu_offload_policy_waits_when_backward_ends(times: int) -> None:
    """A first copy is waited for after the last kernel of a microbatch's backward, and its source is free at once. A
    copy that is added to a sum is waited for before the next kernel."""
    fields = SMALL | dict(stage=3, accumulate=times, offload="optimizer=host,params=host", tie_embeddings=False)
    one, all_ = (run(RunConfig(**fields, offload_policy=how), keep_events=True) for how in ("deepspeed", "fsdp2"))
    assert_alike(one, all_)
    assert_forms(all_)
    events = [event for event in all_.events[0] if event.scope.step == 1 and event.scope.phase == "backward"]
    ends = {slot: at for slot in range(times) for at, event in enumerate(events) if is_kernel(event, slot)}
    copies = [(at, event) for at, event in enumerate(events) if isinstance(event, Copy) and event.target == HOST]
    assert len(copies) == times * len(all_.layout.flats)
    for at, copy in copies:
        waits = {
            event.by: place for place, event in enumerate(events) if isinstance(event, Wait) and event.work == copy.work
        }
        if copy.scope.slot == 0:
            assert min(waits[by] for by in (CPU, COMPUTE)) > ends[0]
            assert isinstance(events[at + 1], Free)
        else:
            assert not any(is_kernel(event, 1) for event in events[at : waits[COMPUTE]])


def is_kernel(event: Event, slot: int) -> bool:
    return isinstance(event, Kernel) and event.place == DEVICE and event.scope.slot == slot


def test_cpu_offload_policy_moves_all_states() -> None:
    fields: dict[str, Any] = SMALL | dict(stage=3)
    for offload in ("", "optimizer=host", "optimizer=nvme,params=host"):
        with pytest.raises(InputError, match="pass --offload optimizer=host,params=host"):
            RunConfig(**fields, offload=offload, nvme="/tmp", offload_policy="fsdp2")
        assert RunConfig(**fields, offload=offload, recipe="fsdp2", nvme="/tmp").offload.policy == "deepspeed"
    both = RunConfig(**fields, offload="optimizer=host,params=host", recipe="fsdp2")
    assert both.offload.policy == "fsdp2"
    with pytest.raises(InputError, match="buffer of its own"):
        both.replace(persistent_grads=True)
