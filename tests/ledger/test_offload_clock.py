"""The clock of offloaded steps: copies and the CPU have streams of their own; the slowest one decides."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import CPU_RATE, Cluster, cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.presets.nodes import find_node
from zerosim.device.events import CPU, Copy, Kernel, Wait
from zerosim.ledger.clock import StepTime
from zerosim.ledger.costs_of import costs_of
from zerosim.placement.memories import DEVICE
from zerosim.report.time import step_lines
from zerosim.train.plan import plan, timeline_of
from zerosim.train.result import RunResult

SIZES: dict[str, Any] = dict(stage=3, ranks=4, layers=4, hidden=64, heads=4, seq=64, steps=1, precision="fp16")
FREE = math.inf


def config(offload: str = "optimizer=nvme,params=nvme", **fields: Any) -> RunConfig:
    return plan_config(**SIZES | fields, offload=offload)


def cluster(**rates: float) -> Cluster:
    node = find_node("dgx-2")
    device = find_hardware(node.gpu)
    free = dict(pcie=FREE, host_rate=FREE, nvme_rate=FREE, cpu_rate=FREE, link=FREE, nic=FREE)
    return replace(cluster_of(device, node=node), latency=0.0, host=0.0, contention=0.0, **free | rates)


def time_of(asked: RunConfig, on: Cluster) -> StepTime:
    time = plan(asked, cluster=on).time
    assert time is not None
    return time


def moved(result: RunResult, *ways: str) -> int:
    return sum(
        row.payload_bytes for row in result.traffic[0] if row.op in ways and row.purpose in ("offload", "control")
    )


@pytest.mark.parametrize("offload", ["optimizer=host", "optimizer=host,params=host", "optimizer=nvme,params=nvme"])
def test_with_free_links_a_step_is_compute(offload: str) -> None:
    time = time_of(config(offload), cluster())
    assert time.seconds == pytest.approx(time.compute, rel=1e-12)
    assert time.seconds == pytest.approx(time_of(plan_config(**SIZES), cluster()).seconds, rel=0.25)


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(["pcie", "nvme_rate", "cpu_rate"]), st.floats(1.0, 1e4))
def test_with_one_slow_link_a_step_is_that_link(slow: str, rate: float) -> None:
    """All that passes it, one direction after the other where they depend on each other: between the busier direction
    and both in a row. Compute, a millionth of that, comes on top."""
    asked, on = config(), cluster(**{slow: rate})
    result = plan(asked, keep_events=True)
    per_rank = rate if slow == "pcie" else rate / 4
    ways = {"pcie": ("host to device", "device to host"), "nvme_rate": ("nvme to host", "host to nvme")}.get(slow)
    if ways is None:
        kernels = [event for event in result.events[0] if isinstance(event, Kernel) and event.place != DEVICE]
        least = most = sum(kernel.bytes_read + kernel.bytes_written for kernel in kernels) / per_rank
    else:
        each = [moved(result, way) / per_rank for way in ways]
        least, most = max(each), sum(each)
    seconds = time_of(asked, on).seconds
    assert least * (1 - 1e-9) <= seconds <= most * (1 + 1e-3)


@given(st.floats(1e9, 1e13), st.floats(1.0, 8.0))
@settings(max_examples=4, deadline=None)
def test_a_faster_link_never_makes_a_step_longer(rate: float, times: float) -> None:
    asked = config()
    slow, fast = (time_of(asked, cluster(nvme_rate=one, pcie=one)) for one in (rate, rate * times))
    assert fast.seconds <= slow.seconds * (1 + 1e-12)


def test_the_parts_add_up_and_streams_are_the_directions() -> None:
    on = cluster_of(find_hardware("v100-32"), node=find_node("dgx-2"))
    time = time_of(config(), on)
    parts = [time.compute, time.slowed, time.bubble, time.host, time.copies, time.cpu, *time.exposed.values()]
    assert sum(parts) == pytest.approx(time.seconds, rel=1e-9)
    assert time.cpu > 0 < time.copies
    timeline = timeline_of(plan(config(), keep_events=True), on)
    streams = {span.stream for span in timeline.last.spans}
    assert streams >= {CPU, "host to device", "device to host", "nvme to host", "host to nvme"}


def test_reading_stepping_and_writing_overlap() -> None:
    """Of tiles that are read and written as fast as they are stepped, all but the ends overlap."""
    asked = config("optimizer=nvme", layers=24, stage=1)
    result = plan(asked, keep_events=True)
    states = moved(result, "host to nvme")
    both = cluster(nvme_rate=4 * states, cpu_rate=4 * 26 / 12 * states)
    alone = cluster(nvme_rate=4 * states)
    assert time_of(asked, both).seconds < 1.25 * time_of(asked, alone).seconds


def test_a_nodes_ranks_share_its_links_and_cpus() -> None:
    on = cluster_of(find_hardware("v100-32"), node=find_node("dgx-2"))
    costs = {ranks: costs_of(config("optimizer=host", ranks=ranks), on) for ranks in (1, 4, 16)}
    out = Copy(plan(config(), keep_events=True).events[0][0].scope, "host", "device", 3 * 10**9, "offload")
    assert [round(costs[ranks].copy(out), 6) for ranks in (1, 4, 16)] == [0.25, 0.25, 1.0]  # 12 GB/s, or 48 of all
    read = out._replace(source="nvme", target="host")
    assert [costs[ranks].copy(read) for ranks in (1, 16)] == [3 / 25, 16 * 3 / 25]
    adam = Kernel(out.scope, "adam", "vector", 0, int(CPU_RATE), 0, (), None, "host")
    assert [costs[ranks].kernel(adam) for ranks in (1, 16)] == pytest.approx([1, 16], rel=1e-6)


def test_cpu_adam_takes_what_the_paper_measured() -> None:
    """ZeRO-Offload, Table 4: seconds of CPU-Adam for 1, 2, 4, 8 and 10 billion parameters. 10B is where the rate is
    from; the others are within 21 %."""
    costs = costs_of(config(ranks=1), cluster_of(find_hardware("v100-32"), node=find_node("dgx-2")))
    for billions, measured in ((1, 0.22), (2, 0.51), (4, 1.03), (8, 2.41), (10, 2.57)):
        scope, numel = plan(config(), keep_events=True).events[0][0].scope, billions * 10**9
        adam = Kernel(scope, "adam", "vector", 0, 14 * numel, 12 * numel, (), None, "host")
        rounds = Kernel(scope, "copy", "vector", 0, 4 * numel, 2 * numel, (), None, "host")
        assert costs.kernel(adam) + costs.kernel(rounds) == pytest.approx(measured, rel=0.21)


def test_waits_by_a_stream_hold_up_that_stream() -> None:
    events = plan(config(prefetch=1), keep_events=True).events[0]
    assert {event.by for event in events if isinstance(event, Wait)} >= {"compute", CPU, "host to device", "dp_shard"}


LATE: dict[str, Any] = dict(stage=2, ranks=1, layers=6, precision="bf16", recipe="paper", steps=None)
UPDATE = ("adam", "copy")
"""The CPU's kernels for one buffer: Adam, and the rounding of new parameters."""


def adam_seconds(asked: RunConfig, on: Cluster) -> float:
    """Of the CPU's kernels in the step that is timed, the norm's not among them."""
    timeline = timeline_of(plan(asked, keep_events=True), on)
    return sum(span.stop - span.start for span in timeline.last.spans if span.stream == CPU and span.name in UPDATE)


@pytest.mark.parametrize("share", [0.25, 1.0, 4.0])
def test_a_delayed_update_hides_the_cpus_step(share: float) -> None:
    """A CPU that takes `share` of forward and backward for its step: of both, the longer one is left, and the norm."""
    asked, free = config("optimizer=host", **LATE), cluster()
    computes = time_of(asked, free).seconds
    rate = adam_seconds(asked, cluster(cpu_rate=1.0)) / (share * computes)
    on = cluster(cpu_rate=rate)
    late, plain = time_of(asked.replace(delayed_update=1), on), time_of(asked, on)
    norm = plain.cpu - adam_seconds(asked, on)
    assert norm > 0
    assert late.seconds == pytest.approx(max(computes, share * computes) + norm, rel=0.01)
    assert late.seconds < plain.seconds == pytest.approx((1 + share) * computes + norm, rel=0.01)


@given(st.floats(1e8, 1e12), st.floats(1e8, 1e12))
@settings(max_examples=6, deadline=None)
def test_a_delayed_update_is_never_slower(cpu_rate: float, pcie: float) -> None:
    asked, on = config("optimizer=host", **LATE), cluster(cpu_rate=cpu_rate, pcie=pcie)
    assert time_of(asked.replace(delayed_update=1), on).seconds <= time_of(asked, on).seconds * (1 + 1e-12)


def test_late_parameters_come_while_the_cpu_still_steps_with_others() -> None:
    """Each copy waits for its own buffer's update, not for all, and for backward to have left the buffer."""
    asked = config("optimizer=host", **LATE, delayed_update=1)
    result = plan(asked, keep_events=True)
    spans = timeline_of(result, cluster(cpu_rate=1e9, pcie=1e10)).last.spans
    stepped = [span.stop for span in spans if span.stream == CPU and span.name == UPDATE[1]]
    steps = dict(zip(reversed(result.layout.flats), stepped, strict=True))
    copies = {span.scope.unit: span for span in spans if span.stream == "host to device" and span.scope.unit}
    assert copies.keys() == steps.keys()
    assert all(copies[unit].start >= steps[unit] for unit in steps)
    assert sum(copy.stop < max(steps.values()) for copy in copies.values()) >= len(steps) - 2
    backward = {span.scope.unit: span.stop for span in spans if span.stream == "compute" and span.name != "wait"}
    assert all(copies[unit].start >= backward[unit] * (1 - 1e-12) for unit in backward if unit in copies)


def test_a_report_says_that_the_cpus_step_can_be_hidden() -> None:
    """Where it can: not where it is already, nor where what was given does not go with it."""
    on, hint = cluster(cpu_rate=1e9), "--delayed-update 1 hides the CPU's step"
    for fields, can in ((LATE, True), (LATE | dict(delayed_update=1), False), (LATE | dict(upcast_grads=True), False)):
        result = plan(config("optimizer=host", **fields), cluster=on)
        assert any(hint in line for line in step_lines(result, on)) == can
