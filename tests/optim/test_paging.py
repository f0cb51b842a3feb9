"""Paged optimizer states: the bits of a run without, moves only where the device is full, and plans as runs."""

from __future__ import annotations

from typing import Any

import pytest
from same import assert_same_training

from zerosim.analysis.checks import checks, formulas_agree
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.cli.main import main
from zerosim.config import RunConfig
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.events import Copy, Wait
from zerosim.device.memory import Exact
from zerosim.device.paging import Pages
from zerosim.dtypes import fp32, uint8
from zerosim.errors import InputError, OutOfMemory
from zerosim.optim import paging
from zerosim.optim.states import StateArray
from zerosim.train.plan import plan
from zerosim.train.result import RunResult
from zerosim.train.run import run

GPT: dict[str, Any] = dict(layers=2, hidden=16, heads=2, seq=8, vocab=256, ranks=2, stage=1, steps=3, optimizer="adamw")
CASES: dict[str, dict[str, Any]] = {
    "stage 0": dict(stage=0, accumulate=3),
    "stage 2": dict(stage=2, precision="fp16", clip_norm=0.1),
    "stage 3": dict(stage=3, gather="module", sub_group=300),
    "fp32": dict(precision="fp32", recompute="full", foreach=True, lazy_states=True),
    "kahan": dict(precision="bf16-pure", rounding="kahan", recompute="full"),
    "8 bits": dict(optimizer="adam8bit", hidden=64),
    "lion": dict(optimizer="lion"),
    "sophia": dict(optimizer="sophia", steps=11),
    "owners": dict(optimizer="muon", stage=2),
    "tp and pp": dict(ranks=4, tp=2, pp=2, accumulate=4, tie_embeddings=False),
    "replicas": dict(ranks=4, dp_replicate=2),
    "qlora": dict(model="llama", hidden=32, lora_rank=16, lora_target="all-linear", base="nf4", recompute="full"),
    "inputs on the host": dict(recompute="full", cpu_checkpointing=True, stash_window=1),
    "parameters on the host": dict(stage=3, offload="params=host"),
}
FULL = "--model gpt2 --ranks 1 --stage 0 --attention flash --recompute full --loss chunked --limit 1.9GB"


@pytest.fixture(autouse=True)
def _small_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "PAGED_NUMEL", 40)


def moved(result: RunResult) -> dict[str, int]:
    rows = [row for rows in result.traffic for row in rows if row.purpose == "pages"]
    return {way: sum(row.payload_bytes for row in rows if row.op == way) for way in {row.op for row in rows}}


@pytest.mark.bits
@pytest.mark.quick(4)
@pytest.mark.parametrize("case", CASES)
def test_a_full_device_moves_states_and_changes_no_bit(case: str) -> None:
    config = RunConfig(**{**GPT, **CASES[case]})
    plain, free = run(config), run(config.replace(paged_states=True))
    assert [one.to_dict() for one in free.memory] == [one.to_dict() for one in plain.memory]
    assert not moved(free)

    full = config.replace(paged_states=True, capacity=max(one.peak.total_bytes for one in plain.memory) * 96 // 100)
    with pytest.raises(OutOfMemory):
        run(full.replace(paged_states=None))
    paged = run(full, keep_events=True)
    assert_same_training(paged, plain)
    assert moved(paged).keys() == {"device to host", "host to device"}
    assert formulas_agree(checks(paged))
    planned = plan(full, every_rank=True, every_block=True, keep_events=True)
    assert planned.events == paged.events
    by_class = plan(full)
    assert [one.to_dict() for one in by_class.memory] == [one.to_dict() for one in paged.memory]
    assert by_class.traffic == paged.traffic


# -- the device ---------------------------------------------------------------------------------------------------
def filled(device: Device, pages: Pages, value: float) -> Buffer:
    buffer = device.alloc((25,), fp32, Kind.OPTIM)
    buffer.array[...] = value
    pages.add(buffer)
    return buffer


def test_the_least_recently_used_leave_and_a_use_brings_them_back() -> None:
    device, pages = Device(0, NumpyBackend(), allocator=Exact(400)), Pages()
    a, b, c, d = (filled(device, pages, value) for value in range(4))
    pages.use([a])
    pages.use([])
    held = device.alloc((30,), fp32, Kind.TEMP)
    assert [one.memory for one in (a, b, c, d)] == ["device", "host", "host", "device"]
    pages.use([b, c])
    assert [one.memory for one in (a, b, c, d)] == ["host", "device", "device", "host"]
    with pytest.raises(OutOfMemory, match=r"200 B of 400 B paged states are in host memory"):
        device.alloc((30,), fp32, Kind.TEMP)
    pages.use([])
    del held
    pages.use([d])
    assert [one.memory for one in (a, b, c, d)] == ["host", "device", "device", "device"]
    assert [one.array[0] for one in (a, b, c, d)] == [0, 1, 2, 3]
    copies = [event for event in device.recorder.events if isinstance(event, Copy)]
    waits = {event.work for event in device.recorder.events if isinstance(event, Wait) and event.by == "compute"}
    assert {copy.work for copy in copies} == waits
    del a, b, c, d
    assert not pages.move_out()


def test_masters_and_scales_are_not_paged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "PAGED_NUMEL", 100_000)
    assert not paging.is_paged(StateArray("exp_avg", 99_999, fp32))
    assert paging.is_paged(StateArray("exp_avg", 100_000, uint8))
    assert not paging.is_paged(StateArray("master", 10**6, fp32))
    assert not paging.is_paged(StateArray("exp_avg_absmax", 10**6, fp32, 0, "blocks"))


@pytest.mark.parametrize("conf", [None, "expandable_segments:True"])
def test_pages_compete_with_a_caching_allocators_segments(conf: str | None) -> None:
    config = RunConfig(**GPT | dict(layers=4, hidden=256, ranks=1, stage=0, precision="fp32", steps=2)).replace(
        allocator="caching", allocator_conf=conf, paged_states=True
    )
    free = plan(config).memory[0]
    assert free.allocator is not None
    full = config.replace(capacity=free.allocator.reserved_bytes * 8 // 10)
    with pytest.raises(OutOfMemory):
        plan(full.replace(paged_states=None))
    paged = plan(full).memory[0]
    assert paged.reserved_bytes <= full.value("capacity") < free.reserved_bytes
    assert paged.host_peak_bytes > free.reserved_bytes - full.value("capacity")


# -- commands -----------------------------------------------------------------------------------------------------
def test_where_no_state_is_large_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "PAGED_NUMEL", 100_000)
    with pytest.raises(InputError, match=r"100,000 .* the largest on a rank has 12,496 \(exp_avg_sq of h\.\d\)"):
        plan(RunConfig(ranks=4, paged_states=True))


def test_a_plan_and_a_search_are_judged_by_what_the_device_has(capsys: pytest.CaptureFixture[str]) -> None:
    words = FULL.split()
    assert main(["plan", *words]) == 3
    assert main(["plan", *words, "--paged-states", "--all"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "paged, device to host" in said
    assert "Host memory of the node at the most:" in said
    assert main(["plan", *words, "--paged-states", "--host-memory", "100MB"]) == 3
    assert "node 0 is out of host memory" in capsys.readouterr().err
    largest = []
    for paged in ([], ["--paged-states"]):
        assert main(["fit", *words, "--micro-batch", "1", "--find", "layers", *paged]) == 0
        largest.append(capsys.readouterr().out)
    assert largest[0] != largest[1]
