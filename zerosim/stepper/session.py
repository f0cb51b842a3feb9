"""The ranks of one run that is stepped: their threads, devices and ledgers.

A rank advances by one event at a time. A session only goes forward: to go back, a new one runs to an earlier point
(`world.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from zerosim.backends.kernels import Backend
from zerosim.comm.runtime import Context, assemble, node_pools, other_memories
from zerosim.comm.scheduler import State
from zerosim.comm.stepping import SteppedRecorder, SteppedScheduler
from zerosim.device.allocators.choose import make_allocator
from zerosim.device.device import Buffer, Device, Kind, Switch
from zerosim.device.events import Event
from zerosim.dtypes import DType
from zerosim.errors import Aborted, InputError, OutOfMemory
from zerosim.ledger.ranks import RankLedgers
from zerosim.models.model import Model
from zerosim.parallel.base import Strategy
from zerosim.train.result import RunResult
from zerosim.train.run import Experiment, RankOutcome
from zerosim.train.world import world_of


class HandedOut(NamedTuple):
    """A buffer that a device handed out under an id; `born` is the number of its alloc in the rank's record."""

    shape: tuple[int, ...]
    dtype: str
    born: int


class SteppedDevice(Device):
    """A device that remembers the shape of each buffer that it hands out, and the event that made it."""

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self.held: dict[int, HandedOut] = {}

    def alloc(self, shape: tuple[int, ...], dtype: DType, kind: Kind, **more: Any) -> Buffer:
        buffer = super().alloc(shape, dtype, kind, **more)
        # Contents are undefined in a run; here a moment that is reached again must look the same. A fill of the backend
        # is no event.
        self.backend.fill(buffer.array, 0.0)
        self.held[buffer.storage.id] = HandedOut(tuple(shape), dtype.name, len(self.recorder.history) - 1)
        return buffer


class Parts(NamedTuple):
    """The parts that a rank's program has built."""

    model: Model
    strategy: Strategy


class Session:
    """The ranks of one run, each waiting before its next event."""

    def __init__(self, experiment: Experiment) -> None:
        config, world = experiment.config, world_of(experiment.config)
        self.experiment = experiment
        self.ledgers = [RankLedgers(rank, world.allocator) for rank in range(config.mesh.ranks)]
        self.parts: list[Parts | None] = [None] * config.mesh.ranks
        self.events: list[tuple[int, Event]] = []
        self.scheduler = SteppedScheduler(config.mesh.ranks, Switch())
        self.recorders = [SteppedRecorder(one.rank, self.scheduler, one.readers) for one in self.ledgers]
        self.devices: list[SteppedDevice] = []

        pools = node_pools(world)

        def make_device(rank: int, backend: Backend, switch: Switch) -> Device:
            recorder, others = self.recorders[rank], other_memories(world, rank, pools[rank])
            allocator = make_allocator(world.allocator, world.capacity, world.allocator_conf)
            self.devices.append(
                SteppedDevice(rank, backend, allocator=allocator, others=others, recorder=recorder, switch=switch)
            )
            return self.devices[-1]

        program = _program(experiment, self.recorders, self.ledgers, self.parts)
        self._ranks = assemble(program, world, make_device, self.scheduler)
        self.transport = self._ranks.transport
        self._ranks.start()
        self._settle()

    @property
    def pending(self) -> list[Event | None]:
        """By rank, its next event; None for a rank that waits for others, or has finished."""
        return self.scheduler.pending

    @property
    def failure(self) -> BaseException | None:
        return self.scheduler.failure

    @property
    def finished(self) -> bool:
        return all(state is State.FINISHED for state in self.scheduler.states)

    def perform(self, rank: int) -> None:
        """Perform the rank's pending event, and the code after it up to its next event. Raises: the run's own
        failure."""
        event = self.pending[rank]
        assert event is not None, f"rank {rank} has no next event"
        self.events.append((rank, event))
        self.scheduler.grant(rank)
        self._settle()

    def _settle(self) -> None:
        """Let the woken ranks run up to their next event, in the order of waking."""
        while self.scheduler.woken and self.failure is None:
            self.scheduler.grant(self.scheduler.woken.popleft())
        if self.failure is None and not self.finished and not any(event is not None for event in self.pending):
            self.scheduler.wait_for_end(1.0)  # a rank is about to report a deadlock
        if self.failure is not None:
            self._ranks.join()
            raise self.failure

    def result(self) -> RunResult:
        """Return the finished run's result. Raises: InputError before its end."""
        if not self.finished:
            raise InputError("the run is not over: world.finish() runs it to its end")
        outcomes = [outcome for outcome in self._ranks.outcomes if outcome is not None]
        for one, recorder in zip(self.ledgers, self.recorders, strict=True):
            recorder.drain()  # buffers dropped after the rank's last event, by code that had looked at them
            one.events = recorder.history
        return self.experiment.result(outcomes, self.ledgers, keep_events=True)

    def close(self) -> None:
        """End every remaining thread. Safe to call at any time and from any thread, more than once."""
        if not self.finished and self.failure is None:
            self.scheduler.abort(Aborted("the world was closed"))
        if self.failure is not None:
            self._ranks.join()


def _program(
    experiment: Experiment, recorders: list[SteppedRecorder], ledgers: list[RankLedgers], parts: list[Parts | None]
) -> Callable[[Context], RankOutcome]:
    """Run a rank's program, on its thread. It holds no reference to the session, so that a dropped world ends."""

    def opened(ctx: Context, model: Model, strategy: Strategy) -> None:
        parts[ctx.rank] = Parts(model, strategy)

    def program(ctx: Context) -> RankOutcome:
        recorders[ctx.rank].thread = threading.get_ident()
        try:
            outcome = experiment.train_rank(ctx, opened=opened)
        except OutOfMemory as error:
            ledgers[ctx.rank].explain(error)
            raise
        parts[ctx.rank] = None  # as in any run, the rank's objects end with its program
        return outcome

    return program
