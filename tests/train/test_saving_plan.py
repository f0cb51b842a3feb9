"""A plan counts a save as a run records it, and leaves the step's own figures alone."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from random_configs import drawn

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.config import RunConfig, plan_config
from zerosim.ledger.saving import SaveCounts, SaveLedger
from zerosim.state.saver import Saver
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import Experiment, run
from zerosim.train.saved import Saved

WAYS = ("sharded", "gathered", "async")
CASES = (
    *(2, 7, 10, 11, 13, 14, 17, 20, 24, 28, 30, 31, 32, 33, 34, 35, 37, 39, 41, 43, 44, 45, 46, 50, 53, 55, 57, 63),
    *(64, 67, 69, 70, 71, 75, 79),
)
"""Draws that take a second or two. Cases 0 to 79 were checked once."""


def saved_by(result: RunResult) -> list[SaveCounts]:
    """What each rank's record says of its last save."""
    found = []
    for events in result.events:
        ledger = SaveLedger()
        ledger.read(events)
        found.append(ledger.last)
    return found


def planned(config: RunConfig, **how: Any) -> Saved:
    save = plan(config, **how).save
    assert save is not None
    return save


@pytest.mark.quick(6)
@pytest.mark.parametrize("case", CASES)
def test_a_plan_counts_what_a_run_records(case: int, tmp_path: Path) -> None:
    """Bytes written, copied, sent and received, host and device at the most; by each rank, and by one of each class."""
    rng = random.Random(f"save {case}")
    way = rng.choice(WAYS)
    _, config = drawn(rng, lambda fields: Experiment(RunConfig(**fields)).config, save_as=way)
    result = run(config.replace(save_state=str(tmp_path / "states")), keep_events=True)
    skipped = [at for at, step in enumerate(result.steps) if step.skipped]
    config = config.replace(steps=len(result.steps))
    every = planned(config, every_rank=True, every_block=True, skipped=skipped)
    assert saved_by(result) == list(every.counts)
    saving = plan(config, skipped=skipped)
    some = saving.save
    assert some is not None
    for rank, one in enumerate(every.counts):
        alike, at = some.counts[rank], some.stands_for[rank]
        assert (alike.written, alike.sent, alike.received, alike.device) == (
            one.written, one.sent, one.received, one.device,
        )  # fmt: skip
        assert (at != rank) or (alike, some.peaks[rank]) == (one, every.peaks[rank])
    step = plan(config.replace(save_as=None), skipped=skipped)
    assert (step.memory, step.traffic, step.stands_for) == (saving.memory, saving.traffic, saving.stands_for)
    assert all(check.agrees is not False for one in checks(saving) for check in one.saved)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "fields",
    [
        {"stage": 3, "accumulate": 9},
        {"stage": 3, "pp": 2, "tp": 2, "accumulate": 12},
        {"stage": 2, "dp_replicate": 2},
        {"stage": 1, "optimizer": "muon", "partition": "owner"},
        {"stage": 3, "lora_rank": 2, "base": "nf4"},
        {"stage": 3, "allocator": "caching"},
        {"stage": 3, "capacity": 10**12},
        {"stage": 3, "cp": 2},
        {"stage": 2, "experts": 4, "top_k": 2, "ep": 2},
        {"stage": 3, "lazy_states": True},
        {"stage": 0, "optimizer": "adam8bit"},
        {"stage": 2, "optimizer": "adafactor", "dp_replicate": 2},
        {"stage": 3, "lora_rank": 2, "base": "nf4", "whole_scales": True},
    ],
    ids=str,
)  # fmt: skip
def test_every_rank_and_block_gives_what_one_of_each_gives(way: str, fields: Mapping[str, Any]) -> None:
    config = plan_config(model="gpt", ranks=8, layers=4, save_as=way, **fields)
    every, some = plan(config, every_rank=True, every_block=True), plan(config)
    assert every.save is not None
    assert some.save is not None
    alike = [(one.written, one.read, one.sent, one.received, one.device) for one in some.save.counts]
    assert alike == [(one.written, one.read, one.sent, one.received, one.device) for one in every.save.counts]
    assert some.save.peaks == every.save.peaks
    assert plan(config.replace(save_as=None)).memory == some.memory


@pytest.mark.parametrize("way", ["sharded", "async"])
@pytest.mark.parametrize("offload", ["optimizer=host", "optimizer=nvme,params=nvme"])
def test_states_elsewhere_are_saved_too(way: str, offload: str) -> None:
    config = plan_config(model="gpt", ranks=4, stage=3, offload=offload, save_as=way, accumulate=8)
    save = planned(config)
    assert {one.written for one in save.counts} == {
        sum(one.written for one in planned(config.replace(offload=None)).counts) // 4
    }
    assert (max(one.read for one in save.counts) > 0) == ("nvme" in offload)
    assert save.device_peak == 0


def test_only_the_first_ranks_of_a_gathered_save_are_unlike_others() -> None:
    config = plan_config(model="llama3-8b", ranks=32, stage=3, tp=2, save_as="gathered")
    save = planned(config)
    assert sorted(set(save.stands_for)) == [0, 1, 2]
    assert [rank for rank, one in enumerate(save.counts) if one.written] == [0, 1]
    assert save.counts[0].written > save.counts[1].written  # norms, which both have


def test_an_owner_is_spliced_but_for_the_rank_that_writes() -> None:
    config = plan_config(model="gpt", ranks=8, stage=1, partition="owner", optimizer="muon", save_as="gathered")
    every = planned(config, every_rank=True)
    assert list(planned(config).counts) == list(every.counts)


def test_a_save_is_no_part_of_a_step_of_a_run() -> None:
    """Its gathers are in the record, and in no count that has a form."""
    result = run(RunConfig(stage=3, ranks=2, steps=2, save_as="gathered", save_every=None))
    assert any(row.saves for row in result.traffic[0])
    plain = run(RunConfig(stage=3, ranks=2, steps=2))
    assert [result.sent_bytes(0, step) for step in range(2)] == [plain.sent_bytes(0, step) for step in range(2)]
    assert all(check.agrees for one in checks(result) for check in one.of_step if check.expected)


@pytest.mark.parametrize("fields", [{"recompute": "full", "cpu_checkpointing": True}, {"ranks_per_node": 2}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_nor_of_its_nodes_and_hosts(way: str, fields: Mapping[str, Any]) -> None:
    found = checks(run(RunConfig(stage=3, ranks=4, steps=2, layers=2, save_as=way, **fields)))
    assert formulas_agree(found)


def test_the_host_holds_one_run_of_a_sharded_save_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counted bytes are the largest run's. Python takes these while it saves, and a little for names."""
    fields: dict[str, Any] = {"model": "flat", "params": 4_000_000, "units": 1, "ranks": 1, "stage": 3, "steps": 1}
    config = RunConfig(precision="fp32", micro_batch=1, save_state=str(tmp_path / "states"), **fields)
    took, after = list[int](), Saver.after

    def measured(self: Saver, done: int) -> None:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        after(self, done)
        took.append(tracemalloc.get_traced_memory()[1] - before)

    monkeypatch.setattr(Saver, "after", measured)
    tracemalloc.start()
    try:
        result = run(config, keep_events=True)
    finally:
        tracemalloc.stop()
    counted = planned(config.replace(save_state=None, save_as="sharded")).counts[0]
    assert saved_by(result) == [counted]
    assert counted.host == counted.largest == 4 * 4_000_000
    assert counted.written == 3 * counted.host
    assert counted.host <= took[0] < counted.host + 1_000_000
