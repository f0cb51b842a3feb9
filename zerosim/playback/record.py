"""Run a step and keep every rank's record, and for each event the line of the strategy that led to it."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from weakref import ref

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from zerosim import parallel, train
from zerosim.backends.kernels import Backend
from zerosim.comm.runtime import Context, assemble, node_pools, other_memories
from zerosim.config import RunConfig
from zerosim.device.allocators.choose import make_allocator
from zerosim.device.device import Device, Switch
from zerosim.device.events import Alloc, Event, Free, Retag
from zerosim.device.interrupts import no_interrupt_lost
from zerosim.device.recorder import Reader, Recorder
from zerosim.errors import OutOfMemory, wrong
from zerosim.ledger.ranks import RankLedgers
from zerosim.placement.memories import DEVICE
from zerosim.playback.frees import COPIES
from zerosim.train.result import RunResult
from zerosim.train.run import Experiment, RankOutcome
from zerosim.train.world import world_of

_PARALLEL, _TRAIN = (str(Path(str(room.__file__)).parent) for room in (parallel, train))
_STAGES = frozenset(f"{_PARALLEL}/{name}.py" for name in ("ddp", "zero1", "zero2", "zero3"))


class Line(NamedTuple):
    """A line of zerosim's own source, `file` below the package, or of a student's; `function` with its class."""

    file: str
    number: int
    function: str
    text: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """A result that kept its events and, if the run was recorded here, by rank the line that led to each event.

    A gathered parameter or a whole gradient has the line of the ZeRO stage in whose call it was freed. Python frees
    other buffers when no name refers to them: their events have None. `name`: the run's name on the page, in place of
    its ZeRO stage. `limit`: the device's bytes, a line on the page.
    """

    result: RunResult
    lines: Sequence[Sequence[Line | None]] = ()
    name: str = ""
    limit: int | None = None


def record(config: RunConfig) -> Recorded:
    """Train one step of `config` on threads and record it.

    Raises: InputError as `run` does, and for ranks in other processes or on GPUs; OutOfMemory; RankFailed.
    """
    for name, plain in (("world", "threads"), ("backend", "numpy")):
        if (given := config.to_dict()[name]) != plain:
            raise wrong(name, f" {given!r}: the player records {plain}; the events are the same there: choose {plain}")
    experiment = Experiment(config if config.optim.steps == 1 else config.replace(steps=1)).without_files()
    config = experiment.config
    world = world_of(config)
    ledgers = [RankLedgers(rank, world.allocator) for rank in range(config.mesh.ranks)]
    recorders = [LineRecorder(one.readers) for one in ledgers]
    pools = node_pools(world)

    def make_device(rank: int, backend: Backend, switch: Switch) -> Device:
        allocator = make_allocator(world.allocator, world.capacity, world.allocator_conf)
        others = other_memories(world, rank, pools[rank])
        return Device(rank, backend, allocator=allocator, others=others, recorder=recorders[rank], switch=switch)

    def program(ctx: Context) -> RankOutcome:
        try:
            return experiment.train_rank(ctx)
        except OutOfMemory as error:
            ctx.device.recorder.drain()
            ledgers[ctx.rank].explain(error)
            raise

    with no_interrupt_lost(), threadpool_limits(limits=1, user_api="blas"):
        outcomes = assemble(program, world, make_device).results(world.timeout_s)
    for one, recorder in zip(ledgers, recorders, strict=True):
        one.events = recorder.history
    return Recorded(experiment.result(outcomes, ledgers, keep_events=True), [each.lines for each in recorders])


class LineRecorder(Recorder):
    """A recorder that keeps its events and, for each, the line that led to it."""

    def __init__(self, readers: tuple[Reader, ...]) -> None:
        super().__init__(readers, keep=True)
        self.lines: list[Line | None] = []
        self._known: dict[tuple[str, int], Line] = {}
        self._copies: set[int] = set()  # the ids of live ones
        self._freed: dict[int, Line | None] = {}  # dead ones, with the stage's line
        self.bury = self._bury  # ranks are threads, which no Ctrl-C interrupts

    def add(self, event: Event) -> None:
        self.settle()
        self.put(event)

    def put(self, event: Event) -> None:
        super().put(event)
        if isinstance(event, Free):
            self.lines.append(self._freed.pop(event.id, None) if event.memory == DEVICE else None)
            return
        if isinstance(event, Retag) or (isinstance(event, Alloc) and event.memory == DEVICE):
            (self._copies.add if event.kind in COPIES else self._copies.discard)(event.id)
        self.lines.append(self._line())

    def _bury(self, owner: ref[object]) -> None:
        self.dead.append(owner)
        id, memory = self.owners[owner]
        if memory == DEVICE and id in self._copies:
            self._copies.remove(id)
            self._freed[id] = self._line(stages_only=True)

    def _line(self, *, stages_only: bool = False) -> Line | None:
        """Return the innermost line in a ZeRO stage's file; else the outermost in `parallel/`, else the engine's."""
        frame, outer, engine = sys._getframe(2), None, None
        while frame is not None:
            file = frame.f_code.co_filename
            if file in _STAGES:
                return self._read(file, frame.f_lineno, frame.f_code.co_qualname)
            if file.startswith(_PARALLEL):
                outer = file, frame.f_lineno, frame.f_code.co_qualname
            elif engine is None and file.startswith(_TRAIN):
                engine = file, frame.f_lineno, frame.f_code.co_qualname
            frame = frame.f_back  # type: ignore[assignment]
        found = None if stages_only else outer or engine
        return None if found is None else self._read(*found)

    def _read(self, file: str, number: int, function: str) -> Line:
        line = self._known.get((file, number))
        if line is None:
            below = Path(file).relative_to(Path(_PARALLEL).parent).as_posix()
            line = self._known[file, number] = Line(below, number, function, linecache.getline(file, number).strip())
        return line
