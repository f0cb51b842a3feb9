"""Buffers that live elsewhere (`device/away.py`): one state machine, and what each of its policies leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from zerosim.config import RunConfig, plan_config
from zerosim.device.away import At, Away, Window
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.events import Alloc, Copy, Event, Free, Wait
from zerosim.dtypes import fp32
from zerosim.train.plan import plan

SIZES: dict[str, Any] = dict(
    layers=4, hidden=64, heads=4, seq=32, vocab=256, micro_batch=2, accumulate=2, ranks=2, steps=2
)
SAVES, INPUTS = dict(offload_activations=True), dict(recompute="full", cpu_checkpointing=True)
POLICIES: dict[str, dict[str, Any]] = {
    **{f"activations, window {most}": SAVES | dict(stash_window=most) for most in (0, 1, 5, 20, 50)},
    **{f"inputs, window {most}": INPUTS | dict(stash_window=most) for most in (1, 2, 50)},
    "inputs inline": INPUTS,
    "parts of inputs inline": INPUTS | dict(tp=2, partition_activations=True),
    "parts of inputs, window 2": INPUTS | dict(tp=2, partition_activations=True, stash_window=2),
}


def returns(events: list[Event]) -> Iterator[tuple[Alloc, Free]]:
    """Yield the device's buffers into which bytes of other memories are copied, and their ends."""
    frees = {event.id: event for event in events if isinstance(event, Free)}
    last: Alloc | None = None
    for event in events:
        if isinstance(event, Alloc) and event.memory == "device":
            last = event
        elif isinstance(event, Copy) and event.target == "device":
            assert last is not None
            yield last, frees[last.id]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_buffer_that_came_back_outlives_its_blocks_backward(policy: str) -> None:
    fields = SIZES | dict(stage=1) | POLICIES[policy]
    events = plan(RunConfig(**fields), keep_events=True).events[0]
    freed = [end.scope for _, end in returns(events)]
    assert {scope.phase for scope in freed} == {"backward"}
    units = [scope.unit for scope in freed]
    each = len(units) // (fields["steps"] * fields["accumulate"] * fields["layers"])
    blocks = [f"h.{block}" for block in reversed(range(fields["layers"])) for _ in range(each)]
    assert units == blocks * (fields["steps"] * fields["accumulate"])


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("memory", ["host", "nvme"])
def test_no_parameters_that_came_back_outlive_their_units_use(memory: str, prefetch: int) -> None:
    offload = f"optimizer={memory},params={memory}"
    config = plan_config(**SIZES | dict(stage=3), prefetch=prefetch, offload=offload)
    events = [e for e in plan(config, keep_events=True).events[0] if e.scope.phase in ("forward", "backward")]
    came = list(returns(events))
    uses = Counter(begin.scope.unit for begin, _ in came)
    assert [uses[f"h.{block}"] for block in range(4)] == [2 * 2 * 2] * 4  # in steps, microbatches, directions
    assert [end.scope for _, end in came] == [begin.scope for begin, _ in came]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("memory", ["host", "nvme"])
def test_no_gradient_that_left_outlives_backward(memory: str, stage: int) -> None:
    config = plan_config(**SIZES | dict(stage=stage), offload=f"optimizer={memory}")
    events = plan(config, keep_events=True).events[0]
    grads = {e.id for e in events if isinstance(e, Alloc) and (e.kind, e.memory) == ("grad", "device")}
    ends = [event.scope.phase for event in events if isinstance(event, Free) and event.id in grads]
    assert len(ends) == len(grads) > 0
    assert set(ends) == ({"backward"} if stage > 1 else {"optimizer"})  # stage 1 stores the whole until the step


# -- the state machine --------------------------------------------------------------------------------------------
def filled(device: Device, value: float) -> Buffer:
    buffer = device.alloc((8,), fp32, Kind.ACTIVATION)
    buffer.array[...] = value
    return buffer


def test_a_buffer_leaves_is_away_and_comes_back(device: Device, live: Callable[[], int]) -> None:
    one = Away(filled(device, 3.0))
    seen = [one.at]
    one.leave(Kind.KEPT)
    seen.append(one.at)
    assert live() == 32  # until the copy is waited for
    one.settle()
    seen.append(one.at)
    assert live() == 0
    one.fetch(Kind.ACTIVATION)
    seen.append(one.at)
    back = one.take()
    assert seen == [At.HERE, At.LEAVING, At.AWAY, At.ARRIVING]
    assert (one.at, live(), back.array.tolist()) == (At.HERE, 32, [3.0] * 8)
    del back
    assert live() == 0  # whoever still knows `one` holds no bytes
    ends = [event.memory for event in device.recorder.history if isinstance(event, Free)]
    assert ends == ["device", "host", "device"]


def test_an_inline_copy_is_never_in_flight(device: Device) -> None:
    one = Away(filled(device, 3.0), inline=True)
    one.leave(Kind.KEPT)
    assert one.at is At.AWAY
    into = filled(device, 0.0)
    one.launch(into)
    assert (one.at, one.take().array.tolist()) == (At.HERE, [3.0] * 8)
    assert not [event for event in [*device.recorder.history, *device.recorder.events] if isinstance(event, Wait)]


def test_a_window_waits_for_the_oldest_and_not_for_one_on_its_way_back(device: Device) -> None:
    some, window = [Away(filled(device, value)) for value in (1.0, 2.0, 3.0, 4.0)], Window(2)
    for one in some[:3]:
        one.leave(Kind.KEPT)
        window.push(one)
    assert [one.at for one in some[:3]] == [At.AWAY, At.LEAVING, At.LEAVING]
    some[1].settle()
    some[1].fetch(Kind.ACTIVATION)
    some[3].leave(Kind.KEPT)
    window.push(some[3])
    assert [one.at for one in some] == [At.AWAY, At.ARRIVING, At.LEAVING, At.LEAVING]
    window.settle()
    assert [one.at for one in some] == [At.AWAY, At.ARRIVING, At.AWAY, At.AWAY]
