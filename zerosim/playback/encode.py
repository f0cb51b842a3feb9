"""The page's data: runs, their layouts and every event that moves a byte, as values that JSON can hold.

The schema is in `docs/player.md`; `decode.py` reads it back. A repeated text stands once in a table, and an event is a
short list that begins with its kind's index in `EVENTS`. The data leave out saves, which only name buffers, an
allocator's addresses and a memory pool's reports.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from zerosim.analysis.checks import checks
from zerosim.config import RunConfig
from zerosim.device.events import (
    Alloc,
    Copy,
    Event,
    Free,
    Kernel,
    Launch,
    Mark,
    Message,
    Retag,
    Save,
    Wait,
)
from zerosim.dtypes import dtype
from zerosim.errors import InputError
from zerosim.ledger.memory import MemoryLedger
from zerosim.placement.memories import DEVICE
from zerosim.playback.flats import axes_of, flat_data, flat_of, groups_of, units_of
from zerosim.playback.frees import Frees
from zerosim.playback.looks import looks
from zerosim.playback.order import call_of, in_order, steps_of
from zerosim.playback.passing import Passing
from zerosim.playback.pieces import Joined
from zerosim.playback.record import Line, Recorded
from zerosim.playback.volume import volume_of
from zerosim.report.names import STAGES
from zerosim.report.words import headline, model_name
from zerosim.train.work import expected_work
from zerosim.units import format_bytes
from zerosim.version import __version__

Data = dict[str, Any]

SCHEMA, VERSION = "zerosim-player", 3
MOST_BYTES = 2_000_000
"""The largest page's data, as JSON."""
EVENTS = (
    "alloc", "free", "retag", "kernel", "launch", "wait", "message", "mark", "copy", "alloc_elsewhere",
    "free_elsewhere",
)  # fmt: skip
"""The kinds of events, by their first number."""
SMALLER = "leave out ZeRO stages, ranks, layers or microbatches"
_FAR_TOO_MANY = 700_000  # events: more than any page could hold


def check_size(*configs: RunConfig, every_rank: bool = True) -> None:
    """Refuse runs that are too large for a page, before they run. Raises: InputError."""
    events = 0
    for config in configs:
        ranks = config.mesh.ranks // config.mesh.pp if every_rank else 1
        events += expected_work(config.replace(steps=1), micro_batches=config.data.accumulate, ranks=ranks).events
    if events > _FAR_TOO_MANY:
        raise InputError(f"about {events:,} events are too many for a page of {format_bytes(MOST_BYTES)}: {SMALLER}")


def encode(*recorded: Recorded, most: int = MOST_BYTES, opens: tuple[int, int] | None = None) -> Data:
    """Return the data of a page that shows these runs, the first one first. If they are too large, kernels are left
    out.

    `opens`: the rank and the number of the first run's event at which the page opens.

    Raises: InputError for a result without events, and for more than a page holds.
    """
    for each in recorded:
        if not each.result.events:
            raise InputError("the player needs the record of a run: zerosim.run(config, keep_events=True)")
    for left_out in ((), ("kernel",)):
        runs = [_Run(one, left_out, opens if at == 0 else None) for at, one in enumerate(recorded)]
        data = _page_of([run.values() for run in runs])
        if opens is not None:
            data["opens"] = f"run=0&at={runs[0].at}&rank={opens[0]}&by=events"
        nbytes = len(as_text(data))
        if nbytes <= most:
            return data
    count = sum(len(run["events"]) for run in data["runs"])
    raise InputError(
        f"{count:,} events are {format_bytes(nbytes)} of data, and a page holds {format_bytes(most)}: {SMALLER}"
    )


def as_text(data: Data) -> str:
    """Return the data as strict JSON on one line."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def _page_of(runs: Sequence[Data]) -> Data:
    return {"schema": SCHEMA, "version": VERSION, "zerosim": __version__, **looks(), "runs": list(runs)}


class _Table:
    """Repeated values, each once, by index."""

    def __init__(self) -> None:
        self.places: dict[Any, int] = {}

    def place(self, value: Any) -> int:
        return self.places.setdefault(value, len(self.places))

    @property
    def values(self) -> list[Any]:
        return list(self.places)


class _Run:
    """One run's values."""

    def __init__(self, recorded: Recorded, left_out: Sequence[str], opens: tuple[int, int] | None = None) -> None:
        self.recorded, self.result, self.left_out = recorded, recorded.result, left_out
        self.checks = checks(recorded.result, 0)
        self._opens, self.at = opens, 0  # a rank's event, and the number of page events up to it
        self.words, self.scopes, self.calls, self.lines = _Table(), _Table(), _Table(), _Table()
        self._names: dict[tuple[int, int], str] = {}  # of buffers, by rank and id
        self.flat_of: dict[str, int] = {}  # of buffers in units with several flats, by rank and id
        self._flats = [*self.result.layout.flats]
        self._places = {name: place for place, name in enumerate(self.result.layout.flats)}
        self._units, self._row = units_of(self.result.config), self.result.config.model.moved_row
        self.joined, self.hops = Joined(self.result.layout, self._units), _Table()
        self.frees, self.passing = Frees(self.result.layout, self._units, self.result.ran), Passing()
        self.row_of: dict[int, int] = {}  # the bytes of a row that travels, by call
        for rank in self.result.ran:
            for event in self.result.events[rank]:
                if isinstance(event, Save):
                    self._names.setdefault((rank, event.id), f"{event.op}: {event.what}")

    def values(self) -> Data:
        result, config, layout = self.result, self.result.config, self.result.layout
        places, events, lines = self._places, list[Any](), list[int]()
        for event, line in self._events():
            events.append(event)
            lines.append(-1 if line is None else self.lines.place(line))
        travels = {
            call: [self.hops.place(tuple(hops)), state, [places[name] for name in names]]
            for call, (hops, state, names) in self.joined.travels().items()
        }
        has_lines = any(line >= 0 for line in lines)
        return {
            "stage": config.parallel.zero_stage,
            "name": self.recorded.name or STAGES[config.parallel.zero_stage],
            "about": headline(config) + (f", {self.recorded.name}" if self.recorded.name else ""),
            "model": model_name(config),
            "parameters": result.num_parameters,
            "dtype": config.precision.param_dtype,
            "mesh": {axis: layout.mesh.size(axis) for axis in axes_of(layout.mesh)},
            "groups": groups_of(layout, result.ran),
            "ranks": [self._rank(rank) for rank in result.ran],
            "flats": [flat_data(layout, name) for name in layout.flats],
            "stages": [[places[name] for name in names] for names in layout.stages],
            "units": {unit: [places[name] for name in names] for unit, names in self._units.items()},
            "flat_of": self.flat_of,
            "row_of": self.row_of,
            "words": self.words.values,
            "scopes": [list(scope) for scope in self.scopes.values],
            "calls": [[*call[:3], list(call[3]), *call[4:]] for call in self.calls.values],
            "most_passing": self.passing.most,
            "hops": [list(hops) for hops in self.hops.values],
            "travels": travels,
            "frees": self.frees.groups(),
            "lines": lines if has_lines else [],
            "sources": [list(line) for line in self.lines.values],
            "left_out": list(self.left_out),
            "limit": self.recorded.limit or config.memory.capacity,
            "events": events,
        }

    def _rank(self, rank: int) -> Data:
        """Return a rank's place, how many ranks it stands for, what it should send, and what its ledger has."""
        result, mesh = self.result, self.result.layout.mesh
        stage, memory = mesh.index(rank, "pp"), result.memory[rank]
        ledger = MemoryLedger()  # without offload a result has no marks of its other memories
        ledger.read(result.events[rank])
        return {
            "rank": rank,
            "place": {axis: mesh.index(rank, axis) for axis in axes_of(mesh)},
            "stands_for": result.stands_for.count(rank),
            "stage": stage,
            "volume": volume_of(self.checks[stage], result),
            "marks": {name: dict(shot.by_kind) for name, shot in memory.marks.items()},
            "peak": memory.peak.total_bytes,
            "others": {
                name: {
                    "peak": other.peak.total_bytes,
                    "marks": {mark: dict(shot.by_kind) for mark, shot in other.marks.items()},
                }
                for name, other in ledger.others.items()
            },
        }

    def _events(self) -> Iterator[tuple[list[Any], Line | None]]:
        records = {rank: steps_of(self.result.events[rank]) for rank in self.result.ran}
        lines, opens, count = self.recorded.lines, self._opens, 0
        for rank, number in in_order(records):
            values = self._event(rank, records[rank][number])
            if values is not None and values[0] not in self.left_out:
                self._read(count, rank, records[rank][number])
                count += 1
                if opens is not None and rank == opens[0] and number <= opens[1]:
                    self.at = count
                own = lines[rank] if lines else ()
                line = own[number] if number < len(own) else None
                yield [EVENTS.index(values[0]), rank, self.scopes.place(records[rank][number].scope), *values[1:]], line

    def _read(self, at: int, rank: int, event: Event) -> None:
        """Read the page's event number `at` for what happens between events."""
        place = self.flat_of.get(f"{rank}/{event.id}") if isinstance(event, Alloc) else None
        self.frees.add(at, rank, event, None if place is None else self._flats[place])
        self.passing.add(rank, event)

    def _event(self, rank: int, event: Event) -> list[Any] | None:
        """Return an event's kind and its values after rank and scope; None for an event that the page leaves out."""
        word = self.words.place
        match event:
            case Alloc():
                name = event.name or self._names.get((rank, event.id), "")
                if (flat := flat_of(event, self._units, self.result)) is not None:
                    self.flat_of[f"{rank}/{event.id}"] = self._places[flat]
                values = [event.id, event.nbytes, word(event.kind), event.padding_bytes, word(name)]
                if event.memory != DEVICE:
                    return ["alloc_elsewhere", *values, word(event.memory)]
                return ["alloc", *values]
            case Free():
                return (
                    ["free", event.id] if event.memory == DEVICE else ["free_elsewhere", event.id, word(event.memory)]
                )
            case Retag():
                return ["retag", event.id, word(event.kind)]
            case Kernel():
                return ["kernel", word(event.name), event.flops]
            case Launch():
                op, axis, group, sequence = call_of(event)
                call = self.calls.place((op, axis, event.purpose, group, sequence, event.algorithm))
                self.joined.add(call, rank, event)
                if self._row and (op, axis, event.purpose) == ("all_to_all", "ep", "activations"):
                    self.row_of[call] = self._row * dtype(event.dtype).itemsize
                sizes = [event.payload_bytes, event.sent_bytes, event.received_bytes]
                return ["launch", event.work, call, word(event.dtype), *sizes, event.modelled_bytes]
            case Wait():
                return ["wait", event.work]
            case Message():
                return ["message", event.work, event.peer, event.nbytes, event.count]
            case Mark():
                return ["mark", word(event.name)]
            case Copy():
                return ["copy", word(event.source), word(event.target), event.nbytes, word(event.purpose), event.work]
            case _:
                return None
