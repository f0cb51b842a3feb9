"""A rank's memory as a PyTorch snapshot, which pytorch.org/memory_viz and torch.cuda._memory_viz open.

A rank is a device of the file. The record's requests go through an allocator again, which places each one. In place of
PyTorch's stack frames stand the buffer's name and the place in the step that requested it. The file holds plain lists,
dicts, strings and numbers, so that a reader needs no class of zerosim's.

Source of the rules: PyTorch, torch/utils/viz/MemoryViz.js and torch/cuda/_memory_viz.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from zerosim.config.presets.cluster import Cluster
from zerosim.device.allocators.arena import Arena
from zerosim.device.allocators.caching import CachingAllocator
from zerosim.device.events import Alloc, Event, Free, Mark, Move, Refusal, Retag, Save, Scope, Segment
from zerosim.ledger.allocator import AllocatorLedger, AllocatorPeaks, replayed
from zerosim.report.export.extents import Extent, Segments
from zerosim.train.plan import timeline_of
from zerosim.train.result import RunResult

Entry = dict[str, Any]
ENTRY_BYTES = {"pickle": 100, "json": 370}  # about, of one event in the file; a buffer has three of them


def memory_snapshot(devices: Mapping[int, DeviceSnapshot], ranks: int) -> dict[str, Any]:
    """Return the file's content. A device's number is its rank's; a rank of `ranks` that is not among them has no
    events."""
    return {
        "segments": [segment for rank in sorted(devices) for segment in devices[rank].segments],
        "device_traces": [devices[rank].trace if rank in devices else [] for rank in range(ranks)],
    }


def moments_of(result: RunResult, cluster: Cluster) -> dict[int, list[float]]:
    """Return the moments at which each buffer of a step is requested or freed, by rank that ran, in seconds from the
    first step on.

    A step begins when the last rank has ended the one before. The plan has kept its events.
    """
    moments: dict[int, list[float]] = {rank: [] for rank in result.ran}
    before = 0.0
    for step in range(result.config.optim.steps or 1):
        timeline = timeline_of(result, cluster, step)
        for rank, track in timeline.tracks.items():
            moments[rank] += [before + seconds for seconds, _ in track.live]
        before += timeline.seconds
    return moments


def file_bytes(events: Sequence[Event], form: str) -> int:
    """Estimate how large a file of this record will be, as 'pickle' or 'json'."""
    return 3 * sum(isinstance(event, Alloc) for event in events) * ENTRY_BYTES[form]


def _until_the_end(events: Sequence[Event]) -> Sequence[Event]:
    """Return events without the frees at the end of the program."""
    ends = [index for index, event in enumerate(events) if isinstance(event, Mark) and event.name == "after_step"]
    return events[: ends[-1] + 1] if ends else events


def _names(events: Sequence[Event]) -> dict[int, str]:
    """Return operations' names for the buffers that they hold, by buffer; of several the first."""
    names: dict[int, str] = {}
    for event in events:
        if isinstance(event, Save):
            names.setdefault(event.id, f"{event.what} of {event.op}")
    return names


class _What(NamedTuple):
    """A buffer's name, and the place in the step that requested it."""

    kind: str
    scope: Scope
    name: str = ""


class _Block(NamedTuple):
    """A live buffer: the requested bytes, and the granted ones."""

    address: int
    nbytes: int
    block_bytes: int
    what: _What


class DeviceSnapshot:
    """One rank's part of the file, `trace` and `segments`, from the beginning of its record until its last step ends or
    a request is refused; with its `peaks`, and the request that ended it, if one did.

    `allocator` is new. `moments` are `moments_of` the rank, in seconds; without them time is the order of entries.
    """

    def __init__(
        self,
        rank: int,
        events: Sequence[Event],
        allocator: CachingAllocator | Arena,
        moments: Sequence[float] | None = None,
    ) -> None:
        self.rank, self.allocator, self.names = rank, allocator, _names(events)
        self.trace: list[Entry] = []
        self.refusal: Refusal | None = None
        self._expands = isinstance(allocator, CachingAllocator) and allocator.knobs.expandable_segments
        self._reserved = Segments()
        self._live: dict[int, _Block] = {}
        self._moments = None if moments is None else iter(moments)
        self._now = 0.0
        self._frames = cache(self._make_frames)
        self._frames_of_end = cache(self._make_frames_of_end)
        ledger = AllocatorLedger()
        for event in replayed(_until_the_end(events), allocator):
            ledger.read([event])
            self._read(event)
        # PyTorch's viewer fails on a file with categories of which none is 'unknown': this entry, no buffer, has it.
        self._add("snapshot", 0, [], addr=0, category="unknown")
        self.peaks: AllocatorPeaks = ledger.peaks
        self.segments = self._segments()

    def _read(self, event: Event) -> None:
        """Read an event as the allocator replayed it. Buffers of no bytes have no block, and are left out."""
        if isinstance(event, Alloc | Free) and self._moments is not None and event.scope.step >= 0:
            self._now = next(self._moments)
        if isinstance(event, Segment):
            self._segment(event)
        elif isinstance(event, Alloc) and event.nbytes:
            what = _What(event.kind, event.scope, self.names.get(event.id, ""))
            address = self.allocator.address_of(event.id)
            self._open(event.id, _Block(address, event.nbytes, event.reserved_bytes, what))
        elif isinstance(event, Free) and event.id in self._live:
            self._close(event.id, event.scope, "freed")
        elif isinstance(event, Retag) and event.id in self._live:
            block = self._close(event.id, event.scope, f"becomes {event.kind}")
            self._open(event.id, block._replace(what=block.what._replace(kind=event.kind, scope=event.scope)))
        elif isinstance(event, Move):
            self._open(event.id, self._close(event.id, event.scope, "moved")._replace(address=event.target))
        elif isinstance(event, Refusal):
            self.refusal = event
            reserved = sum(held.nbytes for held in self._reserved.held)
            device_free = (self.allocator.capacity or 0) - reserved
            frames = self._frames(_What(event.kind, event.scope))
            self._add("oom", event.nbytes, frames, device_free=device_free)

    def _segments(self) -> list[Entry]:
        """Return the reserved segments, each cut into blocks from its first byte to its last."""
        held = sorted(self._reserved.held, key=lambda one: one.address)
        live = sorted(self._live.values(), key=lambda block: block.address)
        starts = [block.address for block in live]
        found = []
        for one in _joined(held) if self._expands else held:
            end = one.address + one.nbytes
            inside = live[bisect_left(starts, one.address) : bisect_left(starts, end)]
            found.append(
                {
                    "device": self.rank,
                    "address": one.address,
                    "total_size": one.nbytes,
                    "allocated_size": sum(block.block_bytes for block in inside),
                    "active_size": sum(block.block_bytes for block in inside),
                    "requested_size": sum(block.nbytes for block in inside),
                    "stream": 0,
                    "is_expandable": self._expands,
                    "frames": [],
                    "blocks": list(self._tiles(one.address, end, inside)),
                }
            )
        return found

    def _tiles(self, address: int, end: int, inside: Sequence[_Block]) -> Iterator[Entry]:
        """Return the blocks of a segment, free ones included."""
        for block in inside:
            if block.address > address:
                yield _tile(address, block.address - address, 0, "inactive", [])
            yield _tile(block.address, block.block_bytes, block.nbytes, "active_allocated", self._frames(block.what))
            address = block.address + block.block_bytes
        if address < end:
            yield _tile(address, end - address, 0, "inactive", [])

    def _segment(self, event: Segment) -> None:
        self._reserved.read(event, len(self.trace))
        taken, given = ("map", "unmap") if self._expands else ("alloc", "free")
        what = taken if event.nbytes > 0 else given
        self._add(f"segment_{what}", abs(event.nbytes), self._frames(_What("", event.scope)), addr=event.address)

    def _open(self, id: int, block: _Block) -> None:
        self._live[id] = block
        self._add("alloc", block.nbytes, self._frames(block.what), addr=block.address, category=block.what.kind)

    def _close(self, id: int, scope: Scope, why: str) -> _Block:
        block = self._live.pop(id)
        for action in ("free_requested", "free_completed"):
            self._add(action, block.nbytes, self._frames_of_end(why, scope, block.what), addr=block.address)
        return block

    def _add(self, action: str, size: int, frames: list[Entry], **more: Any) -> None:
        now = len(self.trace) if self._moments is None else round(self._now * 1e6)
        self.trace.append({"action": action, "size": size, "stream": 0, "time_us": now, "frames": frames, **more})

    def _make_frames(self, what: _What) -> list[Entry]:
        """Return frames, the innermost first, as PyTorch has them. Equal ones are one object, which a pickle stores
        once."""
        kind, scope, name = what
        frames = [_frame("kind", 0, f"{kind}, {name}" if name else kind)] if kind else []
        if scope.unit:
            frames.append(_frame("unit", 0, scope.unit))
        frames.append(_frame("step", max(scope.step, 0), _where(scope._replace(unit=""))))
        return [*frames, _frame("rank", self.rank, f"rank {self.rank}")]

    def _make_frames_of_end(self, why: str, scope: Scope, what: _What) -> list[Entry]:
        return [_frame(why, max(scope.step, 0), _where(scope)), *self._frames(what)]


def _where(scope: Scope) -> str:
    if scope.step < 0:
        return "before the first step"
    where = scope.phase if scope.phase in ("optimizer", "curvature") else f"{scope.phase}, microbatch {scope.slot}"
    return f"{where}, {scope.unit}" if scope.unit else where


def _frame(filename: str, line: int, name: str) -> Entry:
    return {"filename": filename, "line": line, "name": name}


def _joined(held: Sequence[Extent]) -> list[Extent]:
    """Join adjacent pages into one expandable segment."""
    found: list[Extent] = []
    for one in held:
        if found and found[-1].address + found[-1].nbytes == one.address:
            found[-1] = replace(found[-1], nbytes=found[-1].nbytes + one.nbytes)
        else:
            found.append(one)
    return found


def _tile(address: int, size: int, requested: int, state: str, frames: list[Entry]) -> Entry:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}
