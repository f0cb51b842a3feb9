"""One run of a strategy that may do anything: ended in words, whatever it does, within seconds.

Owns the threads of such a run, how long it may stand still, how much it may do, and what is kept of
it: every rank's record and the gradients that reached the optimizer. What a failure means is `blame.py`'s.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from zerosim.allocator import Exact
from zerosim.books import Books
from zerosim.build import build_strategy
from zerosim.comm.collectives import Comm
from zerosim.comm.standing import place, ranks_text
from zerosim.comm.threads import ThreadTransport
from zerosim.device import Device, Switch
from zerosim.errors import Aborted, Deadlock, InputError, LateRank, Mismatch
from zerosim.experiment import Experiment, RankOutcome, world_of
from zerosim.grading.source import line_of_frame, line_of_trace
from zerosim.grading.watched import EVENTS_PER_STEP, BoundedRecorder, Endless, Over, Update, WatchedUpdater
from zerosim.models.model import Model
from zerosim.optim.updater import Updater
from zerosim.parallel.base import Strategy
from zerosim.record import Event
from zerosim.result import RunResult
from zerosim.runtime import Context, Ranks, make_backend, make_contexts
from zerosim.scenario import RunConfig
from zerosim.sharding import slice_size
from zerosim.stepper.match import place as place_in_step

PATIENCE_S = 1.5
"""How long a run may stand without any kernel or collective before it is ended."""

POLL_S = 0.05

Make = Callable[[RunConfig, Model, Comm, Device, Updater], Strategy]


class Failure(NamedTuple):
    """Why a run ended early: the first failure.

    reason   unsolved, deadlock, mismatch, stuck, endless or error
    text     one line, with where in the program it was
    line     the strategy's own line that ran then, or ''
    shape    words on a gathered buffer that is too small, or ''
    """

    reason: str
    rank: int
    text: str
    line: str
    shape: str = ""


class Trial(NamedTuple):
    """A run, finished (`result`) or not (`failure`). Records and updates are by rank; `ended`: who finished.

    `gathered_bytes` are the sizes of units' whole parameters, by the unit's name.
    """

    config: RunConfig
    result: RunResult | None
    failure: Failure | None
    records: list[list[Event]]
    updates: list[list[Update]]
    ended: list[bool]
    gathered_bytes: dict[str, int]


class _Ranks:
    """What the ranks' threads leave behind for the one that watches."""

    def __init__(self, count: int) -> None:
        self.threads = [0] * count
        self.lines = [""] * count
        self.shapes = [""] * count
        self.ended = [False] * count
        self.running = [False] * count
        self.updates: list[list[Update]] = [[] for _ in range(count)]
        self.errors: list[tuple[int, BaseException]] = []  # in the order in which they came


def attempt(config: RunConfig, make: Make | None = None) -> Trial:
    """Run `config` with the strategies of `make` (None: the stage's own) to its end or its first failure.

    Raises: InputError for a bad configuration; nothing that the strategy does is raised.
    """
    books, ranks, switch = Books(config.ranks), _Ranks(config.ranks), Switch()
    limit = EVENTS_PER_STEP * (config.steps or 1)
    recorders = [BoundedRecorder(books.readers(rank), switch, limit) for rank in range(config.ranks)]
    experiment = Experiment(config, _watched_make(make or build_strategy, recorders, ranks))
    backend = make_backend("numpy")
    devices = [
        Device(rank, backend, allocator=Exact(), recorder=recorder, switch=switch)
        for rank, recorder in enumerate(recorders)
    ]
    transport = ThreadTransport(devices)
    contexts = make_contexts(world_of(config), devices, transport)
    threads = Ranks(_program(experiment, ranks), transport, contexts)
    failure = _watched(threads, transport, ranks, recorders)
    records = [recorder.history for recorder in recorders]
    result = None
    if failure is None:
        outcomes = [outcome for outcome in threads.outcomes if outcome is not None]
        result = experiment.result(outcomes, books, records)
    sizes = {
        flat.name: slice_size(flat.numel, config.ranks) * config.ranks * flat.dtype.itemsize
        for flat in experiment.layout.flats
    }
    return Trial(config, result, failure, records, ranks.updates, ranks.ended, sizes)


def _watched_make(make: Make, recorders: list[BoundedRecorder], ranks: _Ranks) -> Make:
    def watched(config: RunConfig, model: Model, comm: Comm, device: Device, updater: Updater) -> Strategy:
        rank = device.rank
        return make(config, model, comm, device, WatchedUpdater(updater, recorders[rank], ranks.updates[rank]))

    return watched


def _program(experiment: Experiment, ranks: _Ranks) -> Callable[[Context], RankOutcome]:
    def program(ctx: Context) -> RankOutcome:
        rank, models = ctx.rank, list[Model]()
        ranks.threads[rank], ranks.running[rank] = threading.get_ident(), True
        try:
            outcome = experiment.train_rank(ctx, opened=lambda ctx, model, strategy: models.append(model))
            ranks.ended[rank] = True
            return outcome
        except BaseException as error:
            ranks.lines[rank] = ranks.lines[rank] or line_of_trace(error.__traceback__)
            ranks.shapes[rank] = _too_small(models)
            if isinstance(error, Endless) or not isinstance(error, Aborted | Over):
                ranks.errors.append((rank, error))
            raise
        finally:
            ranks.running[rank] = False  # a thread's number is used again after its end

    return program


def _too_small(models: list[Model]) -> str:
    for flat in models[0].flats if models else ():
        if flat.param is not None and flat.param.numel < flat.numel:
            return f"{flat.name} is used with {flat.param.numel:,} of its {flat.numel:,} elements"
    return ""


def _watched(
    threads: Ranks[RankOutcome], transport: ThreadTransport, ranks: _Ranks, recorders: list[BoundedRecorder]
) -> Failure | None:
    """Run to the end; no thread outlives it that can be ended."""
    scheduler = transport.scheduler
    try:
        threads.start()
        seen, still = -1, 0
        while not scheduler.ended.wait(POLL_S):
            progress = transport.progress()
            if any(recorder.is_over for recorder in recorders):  # and its strategy swallowed the error
                _stop(transport, ranks, f"did more than {EVENTS_PER_STEP:,} things a step, and goes on")
            elif progress != seen:
                seen, still = progress, 0
            elif still * POLL_S >= PATIENCE_S:
                _stop(transport, ranks, f"did nothing for {PATIENCE_S:g} s")
            still += 1  # looks, not the clock: a machine that was asleep is no rank that is stuck
    except BaseException as error:  # KeyboardInterrupt above all
        scheduler.abort(error)
        _end_threads(threads, ranks)
        raise
    _end_threads(threads, ranks)
    for recorder in recorders:
        recorder.drain()
    return _failure(scheduler.failure, ranks) if scheduler.failure is not None else None


def _stop(transport: ThreadTransport, ranks: _Ranks, why: str) -> None:
    """End a run that will not end by itself, and note where the rank stands that has the turn."""
    scheduler, frames = transport.scheduler, sys._current_frames()
    running = [rank for rank, state in enumerate(scheduler.states) if state.value == "running"] or [0]
    for rank in running:
        ranks.lines[rank] = line_of_frame(frames.get(ranks.threads[rank]))
    where = place(transport.devices[running[0]].where)
    scheduler.abort(LateRank(f"{ranks_text(running)} {why}, in {where}", rank=running[0]))
    _end_stuck(ranks, running)


def _end_threads(threads: Ranks[RankOutcome], ranks: _Ranks) -> None:
    threads.join()
    for _ in range(20):  # what it does with the exception is its own affair: a bare `except:` swallows one
        left = [rank for rank, running in enumerate(ranks.running) if running]
        if not left:
            return
        _end_stuck(ranks, left)
        time.sleep(POLL_S)


def _end_stuck(ranks: _Ranks, stuck: list[int]) -> None:
    for rank in stuck:
        end_thread(ranks.threads[rank])


def end_thread(number: int) -> None:
    """A thread in a loop of its own looks at no switch: an exception is put into it, at its next line."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(number), ctypes.py_object(Over))


def _failure(error: BaseException, ranks: _Ranks) -> Failure:
    if isinstance(error, LateRank):
        rank = error.rank or 0
        reason = "endless" if "goes on" in str(error) else "stuck"
        return Failure(reason, rank, str(error), ranks.lines[rank])
    if isinstance(error, Deadlock):
        rank = next((rank for rank, ended in enumerate(ranks.ended) if not ended), 0)
        return Failure("deadlock", rank, str(error), ranks.lines[rank])
    rank, first = ranks.errors[0] if ranks.errors else (0, error)
    text = " ".join(str(first).split())
    if isinstance(first, NotImplementedError):
        return Failure("unsolved", rank, text, ranks.lines[rank])
    reason = "mismatch" if isinstance(first, Mismatch) else "endless" if isinstance(first, Endless) else "error"
    if not isinstance(first, InputError | Mismatch | Endless):
        text = f"{type(first).__name__}: {text}" if text else type(first).__name__
    scope = first.__dict__.get("zerosim_scope")
    if scope is not None and reason == "error":
        text = f"in {place_in_step(scope)}: {text}"
    return Failure(reason, rank, text, ranks.lines[rank], ranks.shapes[rank])
