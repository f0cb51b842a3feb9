"""One run of a strategy that may do anything: ended in words, whatever it does, within seconds.

Owns the threads of such a run, how much it may do, and what is kept of it: every rank's record and the
gradients that reached the optimizer. How long it may take is `watch.py`'s, what a failure means `blame.py`'s;
what never gives the interpreter back to these threads is ended from outside, by `apart.py`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from zerosim.comm.collectives import Comm
from zerosim.comm.runtime import Context, Ranks, make_backend, make_contexts
from zerosim.comm.rank_status import place, ranks_text
from zerosim.comm.transports.threads import ThreadTransport
from zerosim.config import RunConfig
from zerosim.device.device import Device, Switch
from zerosim.device.events import Event
from zerosim.device.memory import Exact
from zerosim.errors import Aborted, Deadlock, InputError, LateRank, Mismatch, RankFailed, ZerosimError
from zerosim.grading.ending import end_left, end_thread
from zerosim.grading.source import line_of_frame, line_of_trace
from zerosim.grading.watch import LIMIT_S, PATIENCE_S, POLL_S, Watch
from zerosim.grading.watched import EVENTS_PER_STEP, BoundedRecorder, Endless, Over, Update, WatchedUpdater
from zerosim.grading.words import error_words, text_of
from zerosim.ledger.ranks import Books
from zerosim.models.model import Model
from zerosim.optim.updater import Updater
from zerosim.parallel.base import Strategy
from zerosim.stepper.match import place as place_in_step
from zerosim.train.build import build_strategy
from zerosim.train.result import RunResult
from zerosim.train.run import Experiment, RankOutcome, world_of

Make = Callable[[RunConfig, Model, Comm, Device, Updater], Strategy]


class Failure(NamedTuple):
    """Why a run ended early: the first failure.

    reason   unsolved, deadlock, mismatch, stuck, endless, late or error
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
        self.raised: list[Failure] = []  # in the order in which they came


def attempt(config: RunConfig, make: Make | None = None, watch: Watch | None = None) -> Trial:
    """Run `config` with the strategies of `make` (None: the stage's own) to its end or its first failure.

    Raises: InputError for a bad configuration; nothing that the strategy does is raised.
    """
    before = set(sys._current_frames())
    books, ranks, switch = Books(config.mesh.ranks), _Ranks(config.mesh.ranks), Switch()
    limit = EVENTS_PER_STEP * (config.optim.steps or 1)
    recorders = [BoundedRecorder(books.readers(rank), switch, limit) for rank in range(config.mesh.ranks)]
    experiment = Experiment(config, _watched_make(make or build_strategy, recorders, ranks))
    backend = make_backend("numpy")
    devices = [
        Device(rank, backend, allocator=Exact(), recorder=recorder, switch=switch)
        for rank, recorder in enumerate(recorders)
    ]
    transport = ThreadTransport(devices)
    contexts = make_contexts(world_of(config), devices, transport)
    threads = Ranks(_program(experiment, ranks), transport, contexts)
    failure = _watched(threads, transport, ranks, recorders, watch or Watch())
    end_left(before)
    records = [recorder.history for recorder in recorders]
    result = None
    if failure is None:
        failure = _not_whole(devices, recorders)
    if failure is None:
        outcomes = [outcome for outcome in threads.outcomes if outcome is not None]
        try:
            result = experiment.result(outcomes, books, records)
        except Exception as error:
            words = f"the slices that the ranks own do not make up the weights: {error_words(error)}"
            failure = Failure("error", 0, words, "")
    sizes = {
        flat.name: experiment.layout.padded(flat.name, "optim") * flat.dtype.itemsize for flat in experiment.model.flats
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
            if isinstance(error, Aborted | Over) and not isinstance(error, Endless):
                raise
            failure = _raised(rank, error, ranks)
            ranks.raised.append(failure)
            if isinstance(error, ZerosimError | Over):
                raise
            raise RankFailed(failure.text, rank=rank) from None  # nobody else asks a student's error for its words
        finally:
            ranks.running[rank] = False  # a thread's number is used again after its end

    return program


def _too_small(models: list[Model]) -> str:
    for flat in models[0].flats if models else ():
        if flat.param is not None and flat.param.numel < flat.numel:
            return f"{flat.name} is used with {flat.param.numel:,} of its {flat.numel:,} elements"
    return ""


def _not_whole(devices: list[Device], recorders: list[BoundedRecorder]) -> Failure | None:
    """A record of which something is missing counts nothing."""
    for rank, (device, recorder) in enumerate(zip(devices, recorders, strict=True)):
        if device.recorder is not recorder or not recorder.is_whole:
            return Failure("error", rank, f"rank {rank}'s record is not whole: what it did was taken out of it", "")
    return None


def _watched(
    threads: Ranks[RankOutcome],
    transport: ThreadTransport,
    ranks: _Ranks,
    recorders: list[BoundedRecorder],
    watch: Watch,
) -> Failure | None:
    """Run to the end; no thread outlives it that can be ended."""
    scheduler = transport.scheduler
    try:
        threads.start()
        seen, still = -1, 0
        while not scheduler.ended.wait(POLL_S):
            progress = transport.progress()
            watch.look()
            if watch.is_over:
                _stop(transport, ranks, f"did not end within {LIMIT_S:g} s")
            elif any(recorder.is_over for recorder in recorders):  # and its strategy swallowed the error
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
        if scheduler.failure is not None:  # nobody asks its ledgers, which what was cut off may not add up in
            recorder.readers = ()
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


def _failure(error: BaseException, ranks: _Ranks) -> Failure:
    if isinstance(error, LateRank):
        rank, words = error.rank or 0, text_of(error)
        reason = "endless" if "goes on" in words else "late" if "did not end" in words else "stuck"
        return Failure(reason, rank, words, ranks.lines[rank])
    if isinstance(error, Deadlock):
        rank = next((rank for rank, ended in enumerate(ranks.ended) if not ended), 0)
        return Failure("deadlock", rank, text_of(error), ranks.lines[rank])
    return ranks.raised[0] if ranks.raised else Failure("error", 0, error_words(error), ranks.lines[0])


def _raised(rank: int, error: BaseException, ranks: _Ranks) -> Failure:
    """What a rank raised, put into words on its own thread: they are a student's object's, and may take their time."""
    line, shape = ranks.lines[rank], ranks.shapes[rank]
    if isinstance(error, NotImplementedError):
        return Failure("unsolved", rank, text_of(error) or "what raises NotImplementedError", line)
    reason = "mismatch" if isinstance(error, Mismatch) else "endless" if isinstance(error, Endless) else "error"
    text = text_of(error) if isinstance(error, InputError | Mismatch | Endless) else error_words(error)
    scope = error.__dict__.get("zerosim_scope")
    if scope is not None and reason == "error":
        text = f"in {place_in_step(scope)}: {text}"
    return Failure(reason, rank, text, line, shape)
