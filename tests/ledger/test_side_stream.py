"""ZeRO-3's reductions beside compute: a case worked by hand, and what must hold of a whole step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.run import plan_config
from zerosim.device.events import Copy, CpuEvent, Launch, Scope, Wait
from zerosim.errors import InputError
from zerosim.grading.waiting import OnPaper
from zerosim.ledger.clock import simulate
from zerosim.ledger.entries import Busy, Entry
from zerosim.ledger.side_stream import beside
from zerosim.placement.mesh import Mesh
from zerosim.report.time import step_lines
from zerosim.train.plan import paces_of, plan, timeline_of

A100 = replace(cluster_of(find_hardware("a100-80")), contention=0.0)
RUN: dict[str, Any] = dict(
    model="gpt", layers=4, hidden=512, seq=256, ranks=4, stage=3, recipe="deepspeed", reduce_bucket=2_000_000
)


def _reduction(work: int, seconds: int, slot: int) -> list[Entry]:
    """Waited for at once; a byte takes a second, and what arrives is kept in 1 s."""
    scope = Scope(0, "backward", "h.0", slot)
    launch = Launch(scope, work, "reduce_scatter", "bf16", "states", "dp_shard", (0, 1), work, seconds, 0, 0)
    return [launch, Wait(scope, work), Busy(scope, "copy", 1.0, 0, 0)]


@pytest.mark.parametrize(
    ("first", "second", "end"),
    [
        (2, 2, 4 + 4 + 1 + 2 + 1),  # the first is over when the second begins
        (4, 4, 4 + 4 + 1 + 4 + 1),
        (7, 1, 4 + 7 + 1 + 1 + 1),  # 3 s of it are waited for
    ],
)
def test_a_reduction_is_waited_for_when_the_next_begins_or_backward_is_over(first: int, second: int, end: int) -> None:
    """Products of 4 s before each reduction, and a forward after them of which nothing is beside the second one."""
    products = [Busy(Scope(0, "backward", "h.0"), "linear_dgrad", 4.0, 0, 0)]
    forward = Busy(Scope(0, "forward", "h.0", 1), "linear", 9.0, 0, 0)
    entries = [*products, *_reduction(0, first, 0), *products, *_reduction(1, second, 0), forward]
    track = simulate({0: list(beside(entries))}, (0, 0), Mesh(dp_shard=2), OnPaper()).last
    assert track.end == end + 9
    assert track.compute == 2 * 4 + 2 * 1 + 9


@pytest.mark.parametrize("more", [{}, {"accumulate": 3}, {"recompute": "full"}])
def test_the_side_stream_hides_waits_alone_and_leaves_the_record_as_it_is(more: dict[str, Any]) -> None:
    off, on = (plan(plan_config(**RUN, **more, overlap_comm=on), keep_events=True) for on in (False, True))
    assert on.events == off.events
    at_once, beside_it = (timeline_of(result, A100).last for result in (off, on))
    assert beside_it.end < at_once.end
    assert beside_it.compute == pytest.approx(at_once.compute, rel=1e-12)
    assert (beside_it.kernels, beside_it.flops) == (at_once.kernels, at_once.flops)
    assert [nbytes for _, nbytes in beside_it.live] == [nbytes for _, nbytes in at_once.live]


OFFLOADS: list[dict[str, Any]] = [
    dict(offload="optimizer=host", delayed_update=1),
    dict(offload="optimizer=host,params=host", delayed_update=1, prefetch=1, accumulate=3),
    dict(offload="optimizer=nvme,params=nvme", delayed_update=2, steps=3),
    dict(offload="optimizer=host,grads=nvme", accumulate=3),
    dict(offload="optimizer=nvme,params=nvme", accumulate=2, gather="unit", prefetch=2),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("more", OFFLOADS, ids=str)
def test_beside_offload_no_wait_comes_before_its_launch(more: dict[str, Any]) -> None:
    """What a reduction's result goes through, to the host and to a drive, is deferred with it; parameters are not."""
    fields = RUN | dict(hidden=64, seq=32, layers=2, reduce_bucket=50_000, prefetch_elements=0) | more
    off, on = (plan(plan_config(**fields, overlap_comm=on), keep_events=True) for on in (False, True))
    assert on.events == off.events
    at_once, deferred = (paces_of(result, A100, detail=True)[0] for result in (off, on))
    assert Counter(deferred) == Counter(at_once)
    assert deferred != at_once
    launched = set[int | None]()
    for entry in deferred:
        if isinstance(entry, Launch | Copy | CpuEvent):
            launched.add(entry.work)
        assert not isinstance(entry, Wait) or entry.work in launched
    timed = plan(plan_config(**fields), cluster=A100).time
    assert timed is not None
    assert timed.seconds <= timeline_of(off, A100).last.end * (1 + 1e-12)


def test_the_gate_of_new_parameters_stays_where_it_is() -> None:
    """By hand: a reduction's result goes to the host; the CPU's update beside it gates other copies to the device."""
    scope = Scope(0, "backward", "h.0")
    launch, wait, _ = _reduction(0, 4, 0)
    out = Copy(scope, "device", "host", 4, "offload", 1, "compute")
    gate, back = Wait(scope, 9, "host to device"), Copy(scope, "host", "device", 4, "offload", 2, "compute")
    second = Copy(scope, "device", "host", 4, "offload", 3, "compute")
    waits = Wait(scope, 1), Wait(scope, 3, "cpu")
    product = Busy(scope, "linear_dgrad", 4.0, 0, 0)
    entries = [launch, wait, out, gate, back, second, *waits, product]
    assert list(beside(entries)) == [launch, gate, back, product, wait, out, second, *waits]


def test_recipe_deepspeed_overlaps_its_reductions_at_stage_3_alone() -> None:
    assert [plan_config(ranks=2, stage=stage, recipe="deepspeed").clock.overlap_comm for stage in range(4)] == (
        [False] * 3 + [True]
    )
    assert not plan_config(**RUN, overlap="none").clock.overlap_comm
    said = " ".join(step_lines(plan(plan_config(**RUN), cluster=A100), A100))
    assert "waits for ZeRO's collectives" in said
    assert "can be hidden" not in said
    with pytest.raises(InputError, match="overlap_comm: it has no effect without reduce_bucket"):
        plan_config(ranks=2, stage=3, overlap_comm=True)
    with pytest.raises(InputError, match="overlap_comm: stage 0 does not use it"):
        plan_config(ranks=2, stage=0, recipe="deepspeed", overlap_comm=True)
    assert not plan_config(ranks=2, stage=2, recipe="deepspeed", overlap_comm=True).clock.overlap_comm  # a bucket more
