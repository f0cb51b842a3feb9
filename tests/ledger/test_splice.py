"""A long step is spliced from two short ones: it takes exactly as long as one of which every microbatch is planned."""

from __future__ import annotations

from typing import Any

import pytest

from zerosim.config import plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.device.events import Launch, Scope, Wait
from zerosim.ledger.entries import Busy, Entry
from zerosim.ledger.splice import spliced
from zerosim.parallel.pipeline import SCHEDULES
from zerosim.train.plan import plan

H100 = cluster_of(find_hardware("h100"))
SMALL: dict[str, Any] = dict(model="gpt", hidden=32, heads=4, seq=16, vocab=64, stage=1, accumulate=31)


def seconds(fields: dict[str, Any], *, keep_events: bool) -> Any:
    result = plan(plan_config(**SMALL | fields), cluster=H100, keep_events=keep_events)
    assert (result.extended_from is None) == keep_events
    return result.time


PIPELINES = [
    *(dict(pp=pp, ranks=2 * pp, pipeline=kind, layers=2 * pp) for kind in SCHEDULES for pp in (2, 4)),
    dict(pp=4, ranks=4, layers=6, pipeline="zb-h1", stage_layers="0,2,3,1", recompute="full:2"),
    dict(pp=2, ranks=8, tp=2, layers=2, stage=3, pipeline="gpipe", recompute="selective"),
    dict(pp=2, ranks=4, layers=4, optimizer="sophia", stage=2),
    dict(pp=2, ranks=4, layers=2, recipe="megatron", tp=2, sequence_parallel=True, tp_comm_overlap=True),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("fields", PIPELINES, ids=str)
def test_a_pipelines_long_step_takes_as_long_as_all_its_micro_batches(fields: dict[str, Any]) -> None:
    if fields.get("pipeline") == "interleaved":
        fields = fields | {"accumulate": 32}
    assert seconds(fields, keep_events=False) == seconds(fields, keep_events=True)


SHARED_ROWS = [
    *(
        dict(pp=pp, ranks=4 * pp, cp=2, layers=2 * pp, context=way)
        for pp in (2, 4)
        for way in ("ring", "allgather", "ulysses")
    ),
    dict(pp=2, ranks=4, cp=2, layers=4, context_order="contiguous"),
    *(dict(pp=2, ranks=8, cp=2, layers=8, pipeline=kind) for kind in SCHEDULES if kind != "1f1b"),
    dict(pp=4, ranks=8, cp=2, layers=8, pipeline="interleaved", context="ulysses"),
    dict(pp=4, ranks=8, cp=2, layers=4, pipeline="gpipe", context="allgather", recompute="full"),
    dict(pp=2, ranks=8, cp=4, layers=2, stage=3),
    dict(pp=2, ranks=8, cp=2, tp=2, layers=2, recipe="megatron", sequence_parallel=True),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize("fields", SHARED_ROWS, ids=str)
def test_a_pipeline_whose_ranks_share_rows_is_extended_as_one_whose_ranks_do_not(fields: dict[str, Any]) -> None:
    """A ring numbers its messages over forward and backward together, a pipeline's each way apart."""
    fields = SMALL | fields | {"attention": "flash", "accumulate": 32}
    config = plan_config(**fields)
    short, whole = (plan(config, cluster=H100, keep_events=keep) for keep in (False, True))
    alone = plan(plan_config(**fields | {"cp": 1, "context": None, "context_order": None}), cluster=H100)
    assert (short.extended_from is None) == (alone.extended_from is None)
    assert short.extended_from is not None
    assert whole.extended_from is None
    assert short.time == whole.time
    assert short.traffic == whole.traffic
    for one, other in zip(short.memory, whole.memory, strict=True):
        assert one.peak.by_kind == other.peak.by_kind


OFFLOADED = [
    dict(offload="optimizer=host", layers=2, ranks=2),
    dict(offload="optimizer=host,grads=host", stage=2, layers=2, ranks=4, pp=2, pipeline="gpipe"),
    dict(offload="optimizer=nvme,params=nvme", stage=3, layers=2, ranks=2),
    dict(offload="optimizer=host,params=host", stage=3, layers=2, ranks=2, recipe="deepspeed"),
    dict(offload="optimizer=host", stage=2, layers=2, ranks=2, delayed_update=1),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("fields", OFFLOADED, ids=str)
def test_offloaded_states_leave_all_figures_of_all_micro_batches(fields: dict[str, Any]) -> None:
    config = plan_config(**SMALL | fields)
    short, whole = (plan(config, cluster=H100, keep_events=keep) for keep in (False, True))
    assert short.extended_from is not None
    assert short.time == whole.time
    assert short.traffic == whole.traffic
    for one, other in zip(short.memory, whole.memory, strict=True):
        assert one.to_dict() == other.to_dict()
        assert one.others.keys() == other.others.keys() != set()


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_a_capacity_changes_no_digit_of_a_long_step(kind: str) -> None:
    fields = SMALL | dict(pp=2, tp=2, ranks=4, layers=8, pipeline=kind, accumulate=10_000)
    free, within = (plan(plan_config(**fields, capacity=size), cluster=H100) for size in (None, 2**34))
    assert free.time == within.time


def step(microbatches: int, last: str = "end") -> list[Entry]:
    """Compute, a call in flight over each two neighbours, and an end."""
    entries: list[Entry] = []
    for slot in range(microbatches):
        scope = Scope(0, "forward", "unit", slot)
        entries += [Busy(scope, "unit", 1.0, 0, 0), Launch(scope, 7 + slot, "all_gather", "bf16", "states", "dp_shard",
                                                           (0, 1), 3 + slot, 8, 8, 8)]  # fmt: skip
        entries += [Wait(scope, 6 + slot)] if slot else []
    return [*entries, Busy(Scope(0, "optimizer", last), last, 1.0, 0, 0)]


@pytest.mark.parametrize("times", [0, 1, 3])
def test_works_and_calls_are_numbered_anew(times: int) -> None:
    found = spliced(step(3), step(4), times=times)
    assert found is not None
    entries = list(found)
    assert len(entries) == len(found) == len(step(4 + times))
    launches = [entry for entry in entries if isinstance(entry, Launch)]
    assert [launch.sequence for launch in launches] == list(range(3, 7 + times))
    waits = [entry.work for entry in entries if isinstance(entry, Wait)]
    assert waits == [launch.work for launch in launches[:-1]]


@pytest.mark.parametrize("more", [step(4, "another end"), step(2), [*step(4), *step(4)]])
def test_what_adds_no_cycle_is_not_spliced(more: list[Entry]) -> None:
    assert spliced(step(3), more, times=3) is None
