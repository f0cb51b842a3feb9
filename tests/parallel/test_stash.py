"""Checkpointed inputs in a stash window (`nn/stash.py`): same bits, shapes leave the record, copies beside compute."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from same import assert_same_bits
from test_shapes import assert_same_record

from zerosim.analysis.checks import checks
from zerosim.cli.main import main
from zerosim.config import RunConfig, plan_config
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.device.events import Alloc, Copy, Free, Wait
from zerosim.train.plan import plan
from zerosim.train.run import run

SIZES: dict[str, Any] = dict(
    layers=6, hidden=16, heads=2, seq=8, vocab=256, micro_batch=1, accumulate=2, steps=2, ranks=2, recompute="full"
)
RUNS: list[dict[str, Any]] = [
    dict(stage=0, precision="fp32"),
    dict(stage=1, precision="fp16", dropout=0.1),
    dict(stage=2, precision="bf16", offload="optimizer=host"),
    dict(stage=3, precision="bf16", model="llama"),
    dict(stage=3, precision="bf16", gather="module"),
    dict(stage=1, precision="bf16", tp=2, partition_activations=True),
    dict(stage=1, precision="bf16", pp=2, accumulate=4, pipeline="interleaved", virtual_stages=3),
]


def config(**fields: Any) -> RunConfig:
    return RunConfig(**{**SIZES, "cpu_checkpointing": True, **fields})


@pytest.mark.quick(1)
@pytest.mark.parametrize("window", [5, 1])
@pytest.mark.parametrize("fields", RUNS, ids=str)
def test_no_bit_changes_and_shapes_leave_the_record(fields: dict[str, Any], window: int) -> None:
    stashed = config(**fields, stash_window=window)
    result, wanted = run(stashed, keep_events=True), run(config(**fields, cpu_checkpointing=False))
    assert_same_bits(result, wanted)
    assert result.live_bytes_after == [0] * result.config.mesh.ranks
    assert_same_record(stashed, result)
    for stage in range(stashed.mesh.pp):
        assert all(check.agrees is not False for check in checks(result, 1)[stage].copied)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_no_more_than_the_window_is_in_flight_and_the_next_block_down_is_fetched_while_one_runs(window: int) -> None:
    events = plan(config(stage=0, ranks=1, accumulate=1, steps=1, stash_window=window), keep_events=True).events[0]
    copies = {event.work: event for event in events if isinstance(event, Copy)}
    out, back = ([c.work for c in copies.values() if c.target == memory] for memory in ("host", "device"))
    assert len(out) == len(back) == 6
    in_flight, most = set[int](), 0
    for event in events:
        if isinstance(event, Copy) and event.target == "host":
            in_flight.add(event.work)
        elif isinstance(event, Wait) and event.work in in_flight:
            in_flight.remove(event.work)
        most = max(most, len(in_flight))
    assert (most, in_flight) == (window + 1, set())  # one more for a moment: it makes compute wait for the oldest
    order = [event.work for event in events if isinstance(event, Copy | Wait) and event.work in back]
    launched_ahead = [back[0], *(work for pair in pairwise(back) for work in (pair[0], pair[1])), back[-1]]
    assert order == launched_ahead


def test_the_device_holds_the_window_and_the_host_the_rest() -> None:
    """6 inputs of 2sbh bytes: at the end of forward all are on the host, and 2 of them still on the device."""
    nbytes = 2 * 8 * 16
    result = plan(config(stage=0, ranks=1, accumulate=1, steps=1, stash_window=2), keep_events=True)
    end = result.memory[0].marks["end_of_forward"].by_kind
    assert end["kept"] == 2 * nbytes
    assert result.memory[0].host_peak_bytes == 6 * nbytes
    ids = {event.id for event in result.events[0] if isinstance(event, Alloc) and event.memory == "host"}
    assert ids == {event.id for event in result.events[0] if isinstance(event, Free) and event.memory == "host"}


def test_a_fast_link_costs_nothing_and_a_slow_one_is_the_step() -> None:
    """Under the clock: with a free link the step is that without copies, with a slow one that of the copies."""
    a100 = find_hardware("a100-80")
    sizes: dict[str, Any] = dict(model="gpt2-xl", layers=8, ranks=1, stage=0, micro_batch=4, recompute="full")

    def seconds(pcie: float, **fields: Any) -> float:
        links = replace(cluster_of(a100), pcie=pcie)
        time = plan(plan_config(**sizes, **fields), cluster=links).time
        assert time is not None
        return time.seconds

    alone = seconds(25e9)
    stashed = dict(cpu_checkpointing=True, stash_window=5)
    assert seconds(inf, **stashed) == pytest.approx(alone, rel=1e-3)
    assert seconds(25e9, **stashed) < seconds(25e9, cpu_checkpointing=True)
    slow = 1e7
    moved = 2 * 8 * 2 * 4 * 1024 * 1600  # bytes out and back
    assert seconds(slow, **stashed) == pytest.approx(moved / slow, rel=0.05)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--stash-window 5", "stash-window 5: no buffers are copied to the host; pass --cpu-checkpointing or"),
        ("--stash-window -1 --recompute full --cpu-checkpointing", "stash-window"),
        ("--stash-window 5 --recompute full --cpu-checkpointing --backend cuda", "backend cuda"),
    ],
)
def test_bad_input(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words.split()]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1
