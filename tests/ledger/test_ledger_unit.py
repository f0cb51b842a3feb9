"""Ledgers fold events into figures: here event by event, by hand."""

from __future__ import annotations

import pytest

from zerosim.device.events import Alloc, Event, Free, Launch, Mark, Move, Retag, Scope, Segment
from zerosim.ledger import memory
from zerosim.ledger.allocator import AllocatorLedger, AllocatorPeaks
from zerosim.ledger.memory import MemoryLedger
from zerosim.ledger.traffic import CommLedger, TrafficRow

FORWARD, BACKWARD = Scope(0, "forward", "h.0", 0), Scope(0, "backward", "h.1", 0)


def test_live_bytes_peak_and_marks() -> None:
    ledger = MemoryLedger()
    ledger.read(
        [
            Alloc(FORWARD, 1, 100, 100, "param", 10),
            Alloc(FORWARD, 2, 50, 50, "activation", 0),
            Mark(FORWARD, "end_of_forward"),
            Free(BACKWARD, 2),
            Alloc(BACKWARD, 3, 60, 60, "grad", 6),
            Alloc(BACKWARD, 4, 0, 0, "temp", 0),
            Free(BACKWARD, 1),
        ]
    )
    assert ledger.live_bytes == 60
    assert ledger.peak.total_bytes == 160
    assert (ledger.peak.scope, dict(ledger.peak.by_kind)) == (BACKWARD, {"param": 100, "grad": 60})
    assert dict(ledger.peak.padding) == {"param": 10, "grad": 6}
    assert dict(ledger.marks["end_of_forward"].by_unit) == {("h.0", "param"): 100, ("h.0", "activation"): 50}
    assert dict(ledger.now().by_kind) == {"grad": 60}


def test_the_peak_is_the_first_moment_of_the_most() -> None:
    ledger = MemoryLedger()
    ledger.read([Alloc(FORWARD, 1, 10, 10, "param", 0), Free(FORWARD, 1), Alloc(BACKWARD, 2, 10, 10, "grad", 0)])
    assert dict(ledger.peak.by_kind) == {"param": 10}


def test_every_moment_has_a_peak_of_its_own() -> None:
    """Also where the run's peak is long past; a phase and slot that come again are another moment."""
    events = [
        Alloc(FORWARD, 1, 100, 100, "param", 0),
        Free(FORWARD, 1),
        Alloc(BACKWARD, 2, 10, 10, "grad", 0),
        Alloc(BACKWARD, 3, 5, 5, "temp", 0),
        Free(BACKWARD, 3),
        Alloc(FORWARD, 4, 20, 20, "param", 0),
    ]
    ledger, without = MemoryLedger(by_moment=True), MemoryLedger()
    for one in (ledger, without):
        one.read(events)
        assert (one.peak.scope, dict(one.peak.by_kind)) == (FORWARD, {"param": 100})
    assert [(moment[1:], dict(shot.by_kind)) for moment, shot in ledger.moments.items()] == [
        (("forward", 0, 0), {"param": 100}),
        (("backward", 0, 0), {"grad": 10, "temp": 5}),
        (("forward", 0, 1), {"grad": 10, "param": 20}),
    ]
    assert not without.moments


def test_a_peak_that_rises_with_every_unit_makes_no_snapshot_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of N units reaches N peaks while it places them: a snapshot of each would take N squared."""
    ledger, events = MemoryLedger(), list[Event]()
    for unit in range(100):
        scope = Scope(0, "forward", f"h.{unit}", 0)
        events.append(Alloc(scope, 2 * unit, 10, 10, "param", 1))
        events.append(Alloc(scope, 2 * unit + 1, 5, 5, "grad", 0))
        events.append(Free(scope, 2 * unit + 1))
    with monkeypatch.context() as patched:
        patched.setattr(memory, "_snapshot", lambda *_: pytest.fail("a snapshot was made while events were read"))
        ledger.read(events)
    assert ledger.peak.by_kind == {"param": 1000, "grad": 5}
    assert ledger.peak.scope.unit == "h.99"
    assert ledger.peak.by_unit["h.99", "grad"] == 5


def test_a_snapshot_does_not_change() -> None:
    ledger = MemoryLedger()
    ledger.read([Alloc(FORWARD, 1, 10, 10, "param", 0)])
    before = ledger.now()
    ledger.read([Alloc(FORWARD, 2, 10, 10, "param", 0)])
    assert before.total_bytes == 10


def test_retag_moves_bytes_to_another_kind_and_leaves_the_unit() -> None:
    ledger = MemoryLedger()
    ledger.read([Alloc(FORWARD, 1, 100, 100, "unsharded_grad", 4), Retag(BACKWARD, 1, "grad")])
    assert dict(ledger.now().by_unit) == {("h.0", "grad"): 100}
    assert dict(ledger.now().padding) == {"grad": 4}
    assert ledger.live_bytes == ledger.peak.total_bytes == 100


def test_an_allocators_peaks_are_each_of_their_own_moment() -> None:
    ledger = AllocatorLedger()
    ledger.read([Segment(FORWARD, 0, 100), Alloc(FORWARD, 1, 30, 50, "param", 0), Free(FORWARD, 1)])
    ledger.read([Alloc(FORWARD, 2, 40, 45, "param", 0), Move(FORWARD, 2, 50, 0, 40), Move(FORWARD, 2, 0, 8, 40)])
    ledger.read([Segment(BACKWARD, 0, -100), Segment(BACKWARD, 0, 80)])
    assert ledger.peaks == AllocatorPeaks(40, 50, 100, 80, 2)
    assert ledger.peaks.to_dict() == {"fragmentation": 1 - 40 / 100, "moves": 2, "moved_bytes": 80}


def launch(scope: Scope, op: str, sent: int, work: int) -> Event:
    return Launch(scope, work, op, "fp16", "states", "dp_shard", (0, 1), work, 2 * sent, sent, sent)


def test_traffic_by_step_phase_and_operation() -> None:
    ledger = CommLedger()
    ledger.read([launch(FORWARD, "all_gather", 10, 1), launch(BACKWARD, "reduce_scatter", 7, 2)])
    ledger.read([launch(FORWARD, "all_gather", 30, 3), launch(FORWARD._replace(step=1), "all_gather", 1, 4)])
    assert ledger.rows() == [
        TrafficRow(0, "forward", "all_gather", "fp16", "states", "dp_shard", 2, 80, 40, 40),
        TrafficRow(0, "backward", "reduce_scatter", "fp16", "states", "dp_shard", 1, 14, 7, 7),
        TrafficRow(1, "forward", "all_gather", "fp16", "states", "dp_shard", 1, 2, 1, 1),
    ]
