"""A memory snapshot, read by the rules of PyTorch's viewer: entries add up to the ledger's peak, and end in the blocks.

Source of the rules: torch/utils/viz/MemoryViz.js. PyTorch's own reader of such files is in tests/oracle.
"""

from __future__ import annotations

import json
import pickle
import pickletools
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from zerosim.cli.main import main
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.run import plan_config
from zerosim.device.allocators.arena import Arena
from zerosim.device.allocators.choose import make_allocator
from zerosim.device.events import Alloc, Event, Free, Retag, Scope
from zerosim.device.memory import Exact
from zerosim.report.export.memory_snapshot import DeviceSnapshot, moments_of
from zerosim.train.plan import plan

SMALL: dict[str, Any] = dict(layers=4, hidden=128, heads=4, seq=128, ranks=2, stage=2, steps=2, recompute="full")
FLAGS = ["--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "16", "--ranks", "4", "--tp", "2", "--pp", "2"]
# What the viewer's reader of pickles knows.
OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "DICT", "LIST"),
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    *("MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"),
}


def viewed(snapshot: DeviceSnapshot) -> tuple[int, int]:
    """The viewer's two maxima, of what is live and what is reserved. Each block lies in a segment and beside the
    others; what is there after the last entry is what the segments say."""
    live: dict[int, int] = {}
    pages: dict[int, int] = {}
    most_live = most_reserved = 0
    for entry, after in pairwise([*snapshot.trace, {"action": "", "addr": -1}]):
        action, address, size = entry["action"], entry.get("addr", -1), entry["size"]
        if action == "alloc":
            assert size > 0
            assert any(page <= address and address + size <= end for page, end in _joined(pages))
            assert not any(one < address + size and address < one + many for one, many in live.items())
            live[address] = size
        elif action == "free_requested":
            assert live.pop(address) == size
            assert (after["action"], after["addr"], after["size"]) == ("free_completed", address, size)
        elif action in ("segment_alloc", "segment_map"):
            pages[address] = size
        elif action in ("segment_free", "segment_unmap"):
            assert pages.pop(address) == size
        else:
            assert action in ("free_completed", "oom", "snapshot")
        most_live = max(most_live, sum(live.values()))
        most_reserved = max(most_reserved, sum(pages.values()))
    assert _joined(pages) == _joined({one["address"]: one["total_size"] for one in snapshot.segments})
    found: dict[int, int] = {}
    for segment in snapshot.segments:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            if block["state"] == "active_allocated":
                found[address] = block["requested_size"]
                assert block["size"] >= block["requested_size"] > 0
            else:
                assert (block["state"], block["requested_size"]) == ("inactive", 0)
            address += block["size"]
        assert address == segment["address"] + segment["total_size"]
    assert found == live
    return most_live, most_reserved


def _joined(pages: dict[int, int]) -> list[tuple[int, int]]:
    """From where to where, what touches taken together."""
    found: list[tuple[int, int]] = []
    for start, size in sorted(pages.items()):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], start + size
        else:
            found.append((start, start + size))
    return found


@pytest.mark.parametrize(
    ("name", "conf"), [("caching", None), ("caching", "expandable_segments:True"), ("arena", None)]
)
def test_the_viewer_finds_the_peak_of_the_ledger(name: str, conf: str | None) -> None:
    result = plan(plan_config(**SMALL), keep_events=True)
    peak = result.memory[0].peak.total_bytes
    allocator = make_allocator(name, peak if name == "arena" else None, conf)
    assert not isinstance(allocator, Exact)
    snapshot = DeviceSnapshot(0, result.events[0], allocator)
    live, reserved = viewed(snapshot)
    assert live == snapshot.peaks.requested_bytes == peak
    assert reserved == snapshot.peaks.reserved_bytes
    assert (snapshot.peaks.moves > 0) == (name == "arena")  # it has no byte too many
    kept = sum(segment["requested_size"] for segment in snapshot.segments)
    assert kept == sum(result.memory[0].marks["after_step"].by_kind.values())
    categories = {entry["category"] for entry in snapshot.trace if "category" in entry}
    assert {"param", "grad", "optim", "activation", "kept", "unknown"} <= categories
    assert [entry["time_us"] for entry in snapshot.trace] == list(range(len(snapshot.trace)))


def test_frames_say_what_a_buffer_is_and_who_asked() -> None:
    events: list[Event] = [
        Alloc(Scope(), 1, 60, 0, "param", 0),
        Alloc(Scope(), 2, 20, 0, "optim", 0),
        Alloc(Scope(), 4, 0, 0, "temp", 0),
        Free(Scope(0, "forward", "h.0", 2), 1),
        Alloc(Scope(0, "forward", "h.0", 2), 3, 70, 0, "activation", 0),  # fits where the 20 are moved
        Retag(Scope(0, "forward", "h.0", 2), 3, "kept"),
    ]
    snapshot = DeviceSnapshot(5, events, Arena(100))
    assert viewed(snapshot) == (90, 100)
    assert [(entry["action"], entry["addr"], entry["size"]) for entry in snapshot.trace] == [
        *(("segment_alloc", 0, 100), ("alloc", 0, 60), ("alloc", 60, 20)),
        *(("free_requested", 0, 60), ("free_completed", 0, 60)),
        *(("free_requested", 60, 20), ("free_completed", 60, 20), ("alloc", 0, 20), ("alloc", 20, 70)),
        *(("free_requested", 20, 70), ("free_completed", 20, 70), ("alloc", 20, 70), ("snapshot", 0, 0)),
    ]
    shown = [[f"{one['filename']}:{one['line']}:{one['name']}" for one in entry["frames"]] for entry in snapshot.trace]
    assert shown[1] == ["kind:0:param", "step:0:before the first step", "rank:5:rank 5"]
    assert shown[3] == ["freed:0:forward, microbatch 2, h.0", *shown[1]]
    assert shown[11] == ["kind:0:kept", "unit:0:h.0", "step:0:forward, microbatch 2", "rank:5:rank 5"]


def test_out_of_memory_is_the_last_thing_that_happens() -> None:
    result = plan(plan_config(**SMALL), keep_events=True)
    capacity = result.memory[0].peak.total_bytes - 1
    allocator = make_allocator("caching", capacity)
    assert not isinstance(allocator, Exact)
    snapshot = DeviceSnapshot(0, result.events[0], allocator)
    assert snapshot.refusal is not None
    assert [entry["action"] for entry in snapshot.trace[-2:]] == ["oom", "snapshot"]
    oom = snapshot.trace[-2]
    assert oom["size"] == snapshot.refusal.nbytes
    assert oom["device_free"] == capacity - viewed(snapshot)[1]


def test_time_is_the_clocks() -> None:
    result = plan(plan_config(**SMALL), keep_events=True)
    cluster = cluster_of(find_hardware("a100-80"))
    moments = moments_of(result, cluster)[0]
    allocator = make_allocator("caching", None)
    assert not isinstance(allocator, Exact)
    times = [entry["time_us"] for entry in DeviceSnapshot(0, result.events[0], allocator, moments).trace]
    assert times == sorted(times)
    one = plan(plan_config(**SMALL), cluster=cluster).time
    assert one is not None
    assert one.seconds * 1e6 < times[-1] <= 2 * one.seconds * 1e6 + 1  # the second step follows the first


@pytest.mark.slow
def test_both_files_hold_the_same_and_a_rank_is_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("pickle", "json"):
        assert main(["export", "memory", "-o", str(tmp_path / f"a.{form}"), *FLAGS]) == 0
        said = capsys.readouterr().out
        assert "ranks 0 and 2 of 4, one of each group of identical ranks; device N is rank N" in said
        assert "PyTorch's caching allocator" in said
    data = (tmp_path / "a.pickle").read_bytes()
    opcodes = [(opcode.name, argument) for opcode, argument, _ in pickletools.genops(data)]
    assert opcodes[0] == ("PROTO", 4)
    assert {name for name, _ in opcodes} <= OPCODES
    snapshot = pickle.loads(data)
    assert snapshot == json.loads((tmp_path / "a.json").read_text("utf-8"))
    assert [bool(trace) for trace in snapshot["device_traces"]] == [True, False, True, False]
    assert {segment["device"] for segment in snapshot["segments"]} == {0, 2}
    assert main(["export", "memory", "-o", str(tmp_path / "b.json"), *FLAGS, "--every-rank"]) == 0
    every = json.loads((tmp_path / "b.json").read_text("utf-8"))["device_traces"]
    assert [len(trace) for trace in every] == [len(snapshot["device_traces"][rank]) for rank in (0, 0, 2, 2)]
    assert {frame["name"] for frame in every[3][0]["frames"] if frame["filename"] == "rank"} == {"rank 3"}
