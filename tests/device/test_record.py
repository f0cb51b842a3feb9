"""The recorder: what it keeps, whom it feeds."""

from __future__ import annotations

from zerosim.device.events import Alloc, Event, Free, Launch, Mark, Scope
from zerosim.device.recorder import Recorder
from zerosim.device.stretches import Repeat, Stretch


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


def test_a_stretch_is_one_event_for_those_who_fold_it_and_its_events_for_all_others() -> None:
    module, here = Scope(unit=".attn"), Scope(3, "forward", "h.1", 2)
    call = Launch(module, 2, "all_reduce", "fp32", "activations", "tp", (0,), 0, 8, 8, 8)
    stretch = Stretch(
        [Alloc(module, 1, 8, 8, "activation", 0), call, Free(module, 0)], {0: Alloc(module, 0, 4, 4, "temp", 0)}
    )
    repeat = Repeat(here, stretch, [70, 90, 91], 4, [((4, 5), 6)])
    seen = dict[bool, list[Event | Repeat]]()

    class Seeing:
        def __init__(self, *, folds: bool) -> None:
            self.folds = folds

        def read(self, events: list[Event]) -> None:
            seen[self.folds] = list(events)

    recorder = Recorder((Seeing(folds=True), Seeing(folds=False)), keep=True)
    recorder.repeat(repeat)
    recorder.drain()
    there = Scope(3, "forward", "h.1.attn", 2)
    placed = call._replace(scope=there, work=91, group=(4, 5), sequence=6)
    assert seen[True] == [repeat]
    assert seen[False] == recorder.history == [Alloc(there, 90, 8, 8, "activation", 0), placed, Free(there, 70)]
    assert (stretch.nbytes, stretch.highest, stretch.begins, stretch.calls) == (4, 8, 2, {0: 1})
