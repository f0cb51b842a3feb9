"""One run of a strategy that may do anything: ended with a reason, whatever it does, within seconds.

Every rank's record is stored, and the gradients that reached the optimizer. An answer that never releases the
interpreter to the threads here is ended from outside, by `process.py`; `blame.py` says what a failure means to the
student.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from zerosim.backends.kernels import Backend
from zerosim.comm.collectives import Comm
from zerosim.comm.rank_status import ranks_text, scope_text
from zerosim.comm.runtime import Context, assemble
from zerosim.comm.scheduler import Scheduler, State
from zerosim.config import RunConfig
from zerosim.device.device import Buffer, Device, Switch
from zerosim.device.events import Event
from zerosim.device.memory import Allocator, Exact
from zerosim.errors import Aborted, Deadlock, InputError, LateRank, Mismatch, RankFailed, ZerosimError
from zerosim.grading.limits import (
    EVENTS_PER_STEP,
    BoundedRecorder,
    Endless,
    Failure,
    Over,
    Watch,
    end_threads,
    raise_in,
)
from zerosim.grading.own_code import OwnLine, error_words, line_of_frame, line_of_trace, text_of
from zerosim.ledger.ranks import RankLedgers
from zerosim.models.model import Model
from zerosim.optim.optimizer import Add, Optimizer, alone
from zerosim.optim.updater import Updater
from zerosim.parallel.base import Strategy
from zerosim.parallel.pipeline import Schedule
from zerosim.stepper.match import where_in_step
from zerosim.tensor.flat import Flat
from zerosim.train.build import MakeStrategy
from zerosim.train.build_strategy import build_strategy
from zerosim.train.result import RunResult
from zerosim.train.run import Experiment, RankOutcome
from zerosim.train.world import world_of


class Own(NamedTuple):
    """An answer's replacement for zerosim's part: a strategy, the schedule of a pipeline, the allocator of each
    device's memory, or the optimizer."""

    strategy: MakeStrategy = build_strategy
    schedule: Schedule | None = None
    allocator: Callable[[RunConfig], Allocator] = lambda config: Exact()
    optimizer: Optimizer | None = None


class Update(NamedTuple):
    """A gradient as it reached the optimizer on a rank, on the host, and its factor.

    `start` and `size` are the local slice's; `grad` should have `size` elements. `number` counts the rank's events.
    """

    rank: int
    step: int
    unit: str
    start: int
    size: int
    grad: Any
    scale: float
    number: int


class Trial(NamedTuple):
    """A run, finished (`result`) or not (`failure`). Records and updates are by rank; `ended`: the ranks that finished.

    `gathered_bytes` are the sizes of units' whole parameters, by the unit's name; `whole` by rank and unit digests of
    those that a rank held at its end.
    """

    config: RunConfig
    result: RunResult | None
    failure: Failure | None
    records: list[list[Event]]
    updates: list[list[Update]]
    ended: list[bool]
    gathered_bytes: dict[str, int]
    whole: list[dict[str, str]]


def result_of(trial: Trial) -> RunResult:
    """Return the result of a run that is known to have finished."""
    assert trial.result is not None
    return trial.result


class Left(NamedTuple):
    """A run's results: plain data, from which any process makes the trial (`completed`). `lines` are by rank and event
    indices into the rank's `sources`: the answer's own line that led there, -1 for none."""

    failure: Failure | None
    records: list[list[Event]]
    updates: list[list[Update]]
    ended: list[bool]
    outcomes: list[RankOutcome]
    whole: list[dict[str, str]]
    lines: list[list[int]]
    sources: list[list[OwnLine]]


def attempt(config: RunConfig, own: Own | None = None, watch: Watch | None = None) -> Trial:
    """Run `config`, with the student's part, to its end or its first failure.

    Raises: InputError for a bad configuration; no exception of an answer's is raised.
    """
    return completed(config, left_by(config, own, watch))


def left_by(config: RunConfig, own: Own | None = None, watch: Watch | None = None) -> Left:
    """Return the same, as plain results."""
    before = set(sys._current_frames())
    run = _Run(config, own or Own())
    failure = run.to_the_end(watch or Watch())
    end_threads(lambda: set(sys._current_frames()) - before, SystemExit)  # threading does not know of them
    failure = failure or run.missing()
    outcomes = [outcome for outcome in run.threads.outcomes if outcome is not None]
    records, ranks = [recorder.history for recorder in run.recorders], run.ranks
    updates, ended = [rank.updates for rank in ranks], [rank.has_ended for rank in ranks]
    lines, sources = [one.lines for one in run.recorders], [one.own.sources for one in run.recorders]
    return Left(failure, records, updates, ended, outcomes, [rank.whole for rank in ranks], lines, sources)


def completed(config: RunConfig, left: Left) -> Trial:
    """Return a run's trial: its ledgers are read from the records, its weights assembled from the ranks' shards."""
    experiment, failure, result = Experiment(config), left.failure, None
    if failure is None:
        try:
            ledgers = [RankLedgers(rank) for rank in range(config.mesh.ranks)]
            for one, record in zip(ledgers, left.records, strict=True):
                one.events = record
                for reader in one.readers:
                    reader.read(record)
            result = experiment.result(left.outcomes, ledgers, keep_events=True)
        except Exception as error:
            failure = Failure("ends", f"the ranks end with weights that do not fit together: {text_of(error)}")
    padded = experiment.layout.padded
    sizes = {flat.name: padded(flat.name) * flat.dtype.itemsize for flat in experiment.model.flats}
    return Trial(config, result, failure, left.records, left.updates, left.ended, sizes, left.whole)


class _WatchedUpdater(Updater):
    """The run's updater, which stores its inputs."""

    def __init__(self, inner: Updater, recorder: BoundedRecorder, seen: list[Update]) -> None:
        vars(self).update(vars(inner))  # the run's own attributes: its result reads the same reports
        self._recorder = recorder
        self._seen = seen

    def update(self, flat: Flat, grad_scale: float, add: Add = alone) -> None:
        own, grad = flat.own, flat.grad_shard
        numel = 0 if grad is None else grad.numel
        if numel < own.size:
            has = f"{numel:,} elements of gradient" if numel else "no gradient"
            raise InputError(
                f"{flat.name} reaches its update with {has}, its slice has {own.size:,}: "
                "set flat.grad_shard (or call add_grad_shard) with the reduced slice before the step"
            )
        if grad is not None:
            values = np.array(flat.device.backend.to_host(grad.array))
            where = flat.device.rank, flat.device.where.step, flat.name
            self._seen.append(Update(*where, own.start, own.size, values, grad_scale, self._recorder.count))
        super().update(flat, grad_scale, add)


@dataclass(slots=True)
class _Rank:
    """A rank's thread's results for the watching thread."""

    thread: int = 0
    line: str = ""
    is_running: bool = False
    has_ended: bool = False
    updates: list[Update] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)


class _Run:
    """A world of ranks that are watched, and how it ends."""

    def __init__(self, config: RunConfig, own: Own) -> None:
        self.ranks = [_Rank() for _ in range(config.mesh.ranks)]
        scheduler, limit = Scheduler(config.mesh.ranks, 1, Switch()), EVENTS_PER_STEP * (config.optim.steps or 1)
        self.recorders = [BoundedRecorder(scheduler.switch, limit) for _ in self.ranks]

        def make_device(rank: int, backend: Backend, switch: Switch) -> Device:
            return Device(rank, backend, allocator=own.allocator(config), recorder=self.recorders[rank], switch=switch)

        def watched(config: RunConfig, model: Model, comm: Comm, device: Device, updater: Updater) -> Strategy:
            rank = device.rank
            seen = _WatchedUpdater(updater, self.recorders[rank], self.ranks[rank].updates)
            return own.strategy(config, model, comm, device, seen)

        self.experiment = Experiment(config, watched, own.schedule, own.optimizer)
        self.threads = assemble(self._program, world_of(config), make_device, scheduler)
        self.transport, self.devices = self.threads.transport, self.threads.devices
        self._raised: list[Failure] = []  # in the order in which they came
        self._stopped: Failure | None = None

    def to_the_end(self, watch: Watch) -> Failure | None:
        """Run to the end; no thread outlives it that can be ended."""
        scheduler = self.transport.scheduler
        try:
            self.threads.start()
            why = watch.wait(scheduler.wait_for_end, self.transport.progress, self._endless)
            if why is not None:
                self._stop(why)
        except BaseException as error:  # KeyboardInterrupt above all
            scheduler.abort(error)
            raise
        finally:
            self.threads.join()
            end_threads(lambda: [rank.thread for rank in self.ranks if rank.is_running])
        for recorder in self.recorders:
            recorder.drain()
        return self._failure(scheduler.failure) if scheduler.failure is not None else None

    def missing(self) -> Failure | None:
        """Return a failure for a record with missing events."""
        for rank, (device, recorder) in enumerate(zip(self.devices, self.recorders, strict=True)):
            if device.recorder is not recorder or not recorder.is_whole:
                words = f"rank {rank}'s record is not whole: events were removed from it"
                return Failure("error", words, rank=rank)
        return None

    # -- on a rank's own thread ---------------------------------------------------------------------
    def _program(self, ctx: Context) -> RankOutcome:
        rank, models = self.ranks[ctx.rank], list[Model]()
        rank.thread, rank.is_running = threading.get_ident(), True
        try:
            outcome = self.experiment.train_rank(ctx, opened=lambda ctx, model, strategy: models.append(model))
            rank.whole = {flat.name: _digest(flat, flat.param) for flat in models[0].flats if flat.param is not None}
            rank.has_ended = True
            return outcome
        except BaseException as error:
            rank.line = rank.line or line_of_trace(error.__traceback__)
            if isinstance(error, Aborted | Over) and not isinstance(error, Endless):
                raise
            failure = _in_words(error, ctx.rank, rank.line, models)
            self._raised.append(failure)
            if isinstance(error, ZerosimError | Over):
                raise
            raise RankFailed(failure.text, rank=ctx.rank) from None  # a student's error is asked for words only here
        finally:
            rank.is_running = False  # a thread's number is used again after its end

    # -- on the thread of the one that watches ------------------------------------------------------
    def _endless(self) -> Failure | None:
        """A rank had too many events, and its strategy swallowed the error."""
        if any(recorder.goes_on for recorder in self.recorders):
            return Failure("endless", f"did more than {EVENTS_PER_STEP:,} events a step and goes on")
        return None

    def _stop(self, why: Failure) -> None:
        """End a run that would not end, and note the place of the rank that has the turn."""
        scheduler, frames = self.transport.scheduler, sys._current_frames()
        running = [rank for rank, state in enumerate(scheduler.states) if state is State.RUNNING] or [0]
        for rank in running:
            self.ranks[rank].line = line_of_frame(frames.get(self.ranks[rank].thread))
        first = running[0]
        text = f"{ranks_text(running)} {why.text}, in {scope_text(self.devices[first].where)}"
        self._stopped = Failure(why.reason, text, self.ranks[first].line, first)
        scheduler.abort(LateRank(text, rank=first))
        raise_in(self.ranks[rank].thread for rank in running)

    def _failure(self, error: BaseException) -> Failure:
        if isinstance(error, LateRank) and self._stopped is not None:
            return self._stopped
        if isinstance(error, Deadlock):
            rank = next((number for number, rank in enumerate(self.ranks) if not rank.has_ended), 0)
            return Failure("deadlock", text_of(error), self.ranks[rank].line, rank)
        return self._raised[0] if self._raised else Failure("error", error_words(error), self.ranks[0].line)


def _digest(flat: Flat, whole: Buffer) -> str:
    """Return a digest of a flat's whole parameters, padding left out."""
    values = flat.device.backend.to_host(whole.array)
    return hashlib.sha256(values[: flat.numel].tobytes()).hexdigest()


def _in_words(error: BaseException, rank: int, line: str, models: list[Model]) -> Failure:
    """Put a rank's exception into words on its own thread: they come from a student's object, and may take long."""
    if isinstance(error, NotImplementedError):
        return Failure.unsolved(error, line, rank)
    if isinstance(error, Mismatch):
        return Failure("mismatch", text_of(error), line, rank)
    if isinstance(error, Endless):
        return Failure("endless", text_of(error) + _too_small(models), line, rank)
    text = text_of(error) if isinstance(error, InputError) else error_words(error)
    scope = error.__dict__.get("zerosim_scope")
    if scope is not None:
        text = f"in {where_in_step(scope)}: {text}"
    return Failure("error", text + _too_small(models), line, rank)


def _too_small(models: list[Model]) -> str:
    """Return words on a gathered buffer that is smaller than its flat, or ''."""
    for flat in models[0].flats if models else ():
        if flat.param is not None and flat.param.numel < flat.numel:
            return f" ({flat.name} is used with {flat.param.numel:,} of its {flat.numel:,} elements)"
    return ""
