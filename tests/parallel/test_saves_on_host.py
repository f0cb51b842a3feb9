"""Saved buffers of blocks on the host (`nn/saves_on_host.py`): same bits, shapes leave the record, few bytes stay."""

from __future__ import annotations

from dataclasses import replace
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
from zerosim.device.copies import SAVES
from zerosim.device.events import Alloc, Copy, Event, Free, Save, Wait
from zerosim.nn.saves_on_host import MIN_BYTES
from zerosim.train.plan import plan
from zerosim.train.run import run

SIZES: dict[str, Any] = dict(
    layers=3, hidden=64, heads=4, seq=32, vocab=256, micro_batch=2, accumulate=2, steps=2, ranks=2
)
RUNS: list[dict[str, Any]] = [
    dict(stage=0, precision="fp32"),
    dict(stage=3, precision="bf16", model="llama"),
    dict(stage=2, precision="fp16", dropout=0.1, attention="flash"),
    dict(stage=3, gather="module", saves="megatron", dropout=0.1),
    dict(stage=1, pp=2, accumulate=4, layers=4, pipeline="zb-h1"),
    dict(stage=1, tp=2, sequence_parallel=True, recompute="selective:mlp,layernorm"),
    dict(stage=2, offload="optimizer=host", optimizer="adamw"),
    dict(stage=2, optimizer="sophia"),
    dict(stage=3, lora_rank=4),
]


def config(**fields: Any) -> RunConfig:
    return RunConfig(**{**SIZES, "offload_activations": True, **fields})


@pytest.mark.quick(1)
@pytest.mark.parametrize("window", [5, 1, 0])
@pytest.mark.parametrize("fields", RUNS, ids=str)
def test_no_bit_changes_and_shapes_leave_the_record(fields: dict[str, Any], window: int) -> None:
    here = config(**fields, stash_window=window)
    result, wanted = run(here, keep_events=True), run(config(**fields, offload_activations=False))
    assert_same_bits(result, wanted)
    assert result.live_bytes_after == [0] * result.config.mesh.ranks
    assert_same_record(here, result)
    for stage in range(here.mesh.pp):
        assert all(check.agrees is not False for check in checks(result, 1)[stage].copied)


def step_of(**fields: Any) -> list[Event]:
    """One rank's record of one step."""
    return plan(config(stage=0, ranks=1, steps=1, **fields), keep_events=True).events[0]


@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_what_blocks_save_goes_once_and_comes_back_once(attention: str) -> None:
    """All that ops of blocks record as saved, but for buffers below 1 KiB."""
    events = step_of(attention=attention, dropout=0.1)
    saved = {e.id: e.nbytes for e in events if isinstance(e, Save) and e.scope.unit.startswith("h.")}
    small = [nbytes for nbytes in saved.values() if nbytes < MIN_BYTES]
    copies = [e for e in events if isinstance(e, Copy) and e.purpose == SAVES]
    out, back = ([c.nbytes for c in copies if c.target == memory] for memory in ("host", "device"))
    assert small
    assert sorted(out) == sorted(back) == sorted(nbytes for nbytes in saved.values() if nbytes >= MIN_BYTES)


@pytest.mark.parametrize("window", [0, 1, 4])
def test_no_more_than_the_window_is_in_flight(window: int) -> None:
    events = step_of(stash_window=window)
    out = {e.work for e in events if isinstance(e, Copy) and e.target == "host"}
    in_flight, most = set[int](), 0
    for event in events:
        if isinstance(event, Copy) and event.work in out:
            in_flight.add(event.work)
        elif isinstance(event, Wait):
            in_flight.discard(event.work)
        most = max(most, len(in_flight))
    assert (most, in_flight) == (window + 1, set())  # one more for a moment: it makes compute wait for the oldest


def test_the_device_has_one_block_and_the_host_the_rest() -> None:
    """Twelve blocks take hardly more of the device than two; each one's saved buffers are on the host."""

    def ends(layers: int) -> tuple[int, int]:
        memory = plan(config(stage=0, ranks=1, accumulate=1, steps=1, layers=layers)).memory[0]
        return memory.marks["end_of_forward"].by_kind["activation"], memory.host_peak_bytes

    (few, host), (many, more) = ends(2), ends(12)
    stay = 2 * 2 * 4 * (2 * 32)  # a block's small buffers: mean and deviation of two norms, 4 bytes for each token
    assert many - few == 10 * stay
    assert more == 6 * host
    plain = plan(config(stage=0, ranks=1, accumulate=1, steps=1, layers=12, offload_activations=False)).memory[0]
    assert plain.marks["end_of_forward"].by_kind["activation"] == many + more


def test_host_bytes_end_with_the_step() -> None:
    events = step_of(stash_window=5)
    ids = {event.id for event in events if isinstance(event, Alloc) and event.memory == "host"}
    assert ids == {event.id for event in events if isinstance(event, Free) and event.memory == "host"}


def test_a_free_link_costs_nothing_and_a_slow_one_is_the_step() -> None:
    a100 = find_hardware("a100-80")
    sizes: dict[str, Any] = dict(model="gpt2-xl", layers=8, ranks=1, stage=0, micro_batch=4, attention="flash")

    def seconds(pcie: float, **fields: Any) -> float:
        links = replace(cluster_of(a100), pcie=pcie)
        time = plan(plan_config(**sizes, **fields), cluster=links).time
        assert time is not None
        return time.seconds

    here = dict(offload_activations=True, stash_window=5)
    assert seconds(inf, **here) == pytest.approx(seconds(25e9), rel=1e-3)
    assert seconds(25e9, **here) < seconds(25e9, offload_activations=True)
    events = plan(plan_config(**sizes, **here), keep_events=True).events[0]
    moved = sum(event.nbytes for event in events if isinstance(event, Copy))
    assert seconds(1e7, **here) == pytest.approx(moved / 1e7, rel=0.05)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--offload-activations --recompute full", "--cpu-checkpointing"),
        ("--offload-activations --model mlp", "no blocks"),
        ("--offload-activations --backend cuda", "backend cuda"),
        ("--stash-window 5", "--offload-activations"),
    ],
)
def test_bad_input(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words.split()]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_report_says_what_went_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--ranks", "2", "--stage", "2", "--steps", "2", "--offload-activations"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "saved, device to host" in out
    assert "The buffers that blocks save for backward wait in host memory." in out
