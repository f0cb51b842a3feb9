"""The recorder: what it keeps, whom it feeds."""

from __future__ import annotations

from zerosim.device.events import Event, Mark, Scope
from zerosim.device.recorder import Recorder


class Names:
    """Reads the names of marks."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def read(self, events: list[Event]) -> None:
        self.batches.append([event.name for event in events if isinstance(event, Mark)])


def mark(name: str) -> Mark:
    return Mark(Scope(), name)


def test_readers_are_fed_once_in_order() -> None:
    one, other = Names(), Names()
    recorder = Recorder((one, other))
    recorder.add(mark("a"))
    recorder.add(mark("b"))
    recorder.drain()
    recorder.add(mark("c"))
    recorder.drain()
    recorder.drain()
    assert [name for batch in one.batches for name in batch] == ["a", "b", "c"]
    assert one.batches[:2] == other.batches[:2] == [["a", "b"], ["c"]]
    assert recorder.events == recorder.history == []


def test_history_is_kept_when_asked() -> None:
    recorder = Recorder(keep=True)
    for name in "abc":
        recorder.add(mark(name))
        recorder.drain()
    assert recorder.history == [mark("a"), mark("b"), mark("c")]


def test_a_disabled_recorder_keeps_nothing() -> None:
    recorder = Recorder(enabled=False, keep=True)
    recorder.add(mark("a"))
    recorder.drain()
    assert recorder.history == []
