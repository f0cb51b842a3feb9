"""A run that is stepped: by one event or by many, up to a condition, and back.

By default ranks go in a fixed order (`order.py`). The order never changes the result, so any rank may be stepped at any
time.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

from zerosim.comm.scheduler import State
from zerosim.config import RunConfig
from zerosim.device.events import Event
from zerosim.errors import InputError, ZerosimError, message_of, wrong
from zerosim.optim.optimizer import Optimizer
from zerosim.parallel.pipeline import Schedule
from zerosim.report.names import counted
from zerosim.stepper.match import Match, Moment, whole_number
from zerosim.stepper.order import Order
from zerosim.stepper.ownership import Ownership, ownership
from zerosim.stepper.session import Session
from zerosim.stepper.views import PendingCollective, RankView, pending_collectives, world_html
from zerosim.train.build import MakeStrategy
from zerosim.train.result import RunResult
from zerosim.train.run import Experiment

STARTS = ("init", "collective")


def debug(
    config: RunConfig,
    *,
    start: str = "init",
    make_strategy: MakeStrategy | None = None,
    schedule: Schedule | None = None,
    optimizer: Optimizer | None = None,
) -> DebugWorld:
    """Return the run of `config`, to be stepped; use it in a `with`.

    start   'init': every rank stands before its first event, when nothing is placed yet; 'collective': all are
            placed and stand before the first collective of step 0

    `make_strategy(config, model, comm, device, updater)` gives a strategy of your own, and
    `schedule(num_stages, stage, micro_batches, chunks)` the actions of a pipeline's stage;
    an `optimizer` of your own takes the place of the configuration's.

    Raises: InputError as `run` does, and with 'collective' the failure of a run that ends before its first collective.
    """
    if start not in STARTS:
        raise InputError(f"start {start!r}: expected {' or '.join(map(repr, STARTS))}")
    if not isinstance(config, RunConfig):
        raise InputError(
            f"debug takes a RunConfig, not a {type(config).__name__}: zerosim.debug(zerosim.RunConfig(...))"
        )
    for name, plain, why in (
        ("world", "threads", "a rank is stopped between two events, and ranks of other processes cannot be"),
        ("backend", "numpy", "a GPU runs behind the program, and cannot be stopped between two events"),
    ):
        if (given := config.to_dict()[name]) != plain:
            raise wrong(
                name,
                f" {given!r}: stepping needs {plain}, for {why}; the events are the same there, so step with {plain}",
            )
    world = DebugWorld(Experiment(config, make_strategy, schedule, optimizer).without_files())
    if start == "collective":
        world.next_collective()
    return world


class DebugWorld:
    """A run that is stepped. Its failure is raised where it happens; its buffers at that moment can still be inspected.

    `next` returns the event that it made happen. `until`, `next_collective`, `finish_step` and `back` return the next
    event, before which the world now stands, as `peek` does. `last` is the one that happened last.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.config: RunConfig = experiment.config
        self._experiment = experiment
        self.after_event: Callable[[], None] = lambda: None
        """Called after each event. An exception from it ends the current command, and the world stands after that
        event."""
        self._breakpoints: list[Match] = []
        self._last: Moment | None
        self._is_closed = False
        self._holder: list[Session] = []
        # The ranks' threads hold no reference to this object: dropping it ends them.
        self._closer = weakref.finalize(self, _close, self._holder)
        self._open()

    def _open(self) -> None:
        self._order, self._last = Order(self.config.mesh.ranks), None
        self._holder[:] = [Session(self._experiment)]

    @property
    def session(self) -> Session:
        return self._holder[0]

    # -- going on -------------------------------------------------------------------------------
    def next(self, rank: int | None = None, count: int = 1) -> Moment:
        """Perform one event: the next in order, or the next of `rank` (others go first if it waits for them).

        Returns the event that happened, the last of `count`. Raises: InputError when the run (or that rank) is over,
        and the run's own failure.
        """
        whole_number("count", count)
        if rank is not None:
            self._checked(Match(rank=rank))
        if count < 1:
            raise InputError(f"count {count}: expected at least 1")
        moment = self._next(rank)
        for _ in range(count - 1):
            moment = self._next(rank)
        return moment

    def until(
        self,
        what: str | None = None,
        *,
        rank: int | None = None,
        phase: str | None = None,
        unit: str | None = None,
        kind: str | None = None,
        step: int | None = None,
    ) -> Moment:
        """Go on until the next event in order matches. Return that event, which has not happened yet.

        At least one event happens first, so that the same call goes on to the next such event. Without
        `step` it looks no further than the end of this step. Stops earlier at a breakpoint.

        Raises: InputError for a condition that no event can meet, and when the step (or the run) ends first.
        """
        match = self._checked(Match(what, rank, phase, unit, kind, step))
        if step is not None and step < self.step:
            raise wrong("step", f" {step} is over: world.back() goes back to it")
        last = self.step if step is None else step
        upcoming = self._advance(last, match)
        if upcoming is None or self.step > last:
            when = "the run" if upcoming is None else f"step {last:g}"
            raise InputError(f"{match} did not come before {when} ended; the world stands there")
        return upcoming

    def next_collective(self) -> Moment:
        """Go on until every rank is waiting at the next collective, the first that none of them has joined.

        If all are already waiting at one, they go through it and up to the one after. Stops earlier at a breakpoint.
        Returns the next event. Raises: InputError when the run ends first.
        """
        if self._next_rank() is None:
            raise InputError(self._over())
        number, has_gone = self._order.next_collective(self.session.pending), False
        while (rank := self._order.next_late(self.session.pending, number)) is not None:
            self._order.turn = rank  # also if a breakpoint stops it: that event comes next
            if has_gone and self._breaks(RankView(self.session, rank).next_event):
                break
            self._perform(rank)
            has_gone = True
        upcoming = self.peek()
        if upcoming is None:
            raise InputError("no collective came before the run ended; the world stands there")
        return upcoming

    def finish_step(self) -> Moment | None:
        """Go on until every rank has ended this step, or a breakpoint. Return the next event; None at the end."""
        return self._advance(self.step)

    def finish(self) -> RunResult:
        """Go on to the end, past any breakpoint. Return the run's result."""
        while not self.finished:
            self._next(None)
        return self.result()

    def break_on(
        self,
        what: str | None = None,
        *,
        rank: int | None = None,
        phase: str | None = None,
        unit: str | None = None,
        kind: str | None = None,
        step: int | None = None,
    ) -> None:
        """Make `until`, `next_collective` and `finish_step` also stop before events like that from now on.

        `clear_breaks` forgets them.
        """
        self._breakpoints.append(self._checked(Match(what, rank, phase, unit, kind, step)))

    def _checked(self, match: Match) -> Match:
        return match.checked(self.config.mesh.ranks, self.units, self.steps)

    def clear_breaks(self) -> None:
        self._breakpoints.clear()

    def back(self, count: int = 1) -> Moment:
        """Undo the last `count` events, by running again from the start to there. Return the next event.

        A run that failed, or was interrupted, goes on from there. Raises: InputError for more events than have
        happened, and after `close`.
        """
        whole_number("back", count)
        if self._is_closed:
            raise InputError("the world was closed: open another with zerosim.debug")
        before = self.session.events  # the world is a function of their ranks
        if not 1 <= count <= len(before):
            raise InputError(f"back {count}: expected 1 to {len(before):,}, the events that have happened")
        self.session.close()
        self._open()
        try:
            for rank, _ in before[: len(before) - count]:
                self._perform(rank)
        except KeyboardInterrupt:
            self.session.close()
            self.session.events = before  # all can still be undone
            raise
        upcoming = self.peek()
        assert upcoming is not None  # the event that was undone first, if no other
        return upcoming

    # -- looking --------------------------------------------------------------------------------
    @property
    def ranks(self) -> tuple[RankView, ...]:
        """One view per rank, of this moment; after the next event ask again."""
        return tuple(RankView(self.session, rank) for rank in range(self.config.mesh.ranks))

    @property
    def steps(self) -> int:
        """How many steps the run has."""
        return self._experiment.steps

    @property
    def step(self) -> float:
        """The step of the next event in order; infinity when all are over, or the run has failed."""
        rank = self._next_rank()
        event = None if rank is None else self.session.pending[rank]
        return math.inf if rank is None or event is None else self._order.step_of(rank, event)

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(part.name for unit in self._experiment.model.units for part in (unit, *unit.leaves))

    @property
    def events(self) -> list[tuple[int, Event]]:
        """All events so far, as (rank, event), in the order in which they happened."""
        return list(self.session.events)

    @property
    def last(self) -> Moment | None:
        """The event that happened last."""
        return self._last

    def peek(self) -> Moment | None:
        """Return the next event in order; None when the run is over or has failed."""
        rank = self._next_rank()
        return None if rank is None else RankView(self.session, rank).next_event

    @property
    def pending_collectives(self) -> list[PendingCollective]:
        """Collectives that some ranks have joined and others have not."""
        return pending_collectives(self.session)

    def ownership(self) -> Ownership:
        """Return which rank updates which slice of each unit."""
        return ownership(self.session)

    @property
    def finished(self) -> bool:
        return self.session.finished

    def result(self) -> RunResult:
        """Return the finished run's result, as `run` does. Raises: InputError before its end."""
        return self.session.result()

    # -- ending ---------------------------------------------------------------------------------
    def close(self) -> None:
        """End all threads, for good. The record can still be inspected."""
        self._is_closed = True
        self.session.close()

    def __enter__(self) -> DebugWorld:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    # -- the order ------------------------------------------------------------------------------
    def _next(self, rank: int | None) -> Moment:
        """Perform one event in order, or one of a rank, after the events that it waits for."""
        while True:
            chosen = self._next_rank()
            if chosen is None:
                raise InputError(self._over())
            if rank is not None and self.session.pending[rank] is not None:
                chosen = rank
            if rank is not None and self.session.scheduler.states[rank] is State.FINISHED:
                raise wrong("rank", f" {rank} has finished and has no next event; world.back() undoes some")
            moment = self._perform(chosen)
            if rank is None or chosen == rank:
                return moment

    def _perform(self, rank: int) -> Moment:
        moment = RankView(self.session, rank).next_event
        assert moment is not None
        self._order.note(rank, moment.event)
        self._last = moment  # noted first: a failure comes after the event that led to it
        try:
            self.session.perform(rank)
        except ZerosimError:
            raise
        except BaseException:  # an interrupt in the middle of a hand-over: the rank's position is unknown
            self.session.close()
            raise
        self.after_event()
        return moment

    def _advance(self, last: float, match: Match | None = None) -> Moment | None:
        """Go on until the next event matches, is of a step after `last`, or is at a breakpoint. Return it."""
        while True:
            self._next(None)
            upcoming = self.peek()
            if upcoming is None or self.step > last or self._breaks(upcoming):
                return upcoming
            if match is not None and match.matches(upcoming.rank, upcoming.event):
                return upcoming

    def _next_rank(self) -> int | None:
        return None if self.session.failure is not None else self._order.next_rank(self.session.pending)

    def _breaks(self, upcoming: Moment | None) -> bool:
        return upcoming is not None and any(match.matches(upcoming.rank, upcoming.event) for match in self._breakpoints)

    def _over(self) -> str:
        if self.session.failure is not None:
            undo = "" if self._is_closed else "; world.back() goes back to before it"
            return f"the run has ended: {message_of(self.session.failure)}{undo}"
        return "the run is over: world.back() undoes events, world.result() is its result"

    def __repr__(self) -> str:
        upcoming = self.peek()
        ended = "closed" if self._is_closed else "failed" if self.session.failure is not None else "at its end"
        where = f"before {upcoming!r}" if upcoming is not None else ended
        return (
            f"DebugWorld(stage {self.config.parallel.zero_stage}, {counted(self.config.mesh.ranks, 'rank')}, "
            f"{counted(len(self.session.events), 'event')}, {where})"
        )

    def _repr_html_(self) -> str:
        upcoming, last = self.peek(), self.last
        notes = [f"done: {last!r}"] if last else []
        notes += [f"next: {upcoming!r}"] if upcoming else []
        return world_html(
            self.ranks, repr(self).partition(", before ")[0] + ")", [*notes, *map(repr, self.pending_collectives)]
        )


def _close(holder: list[Session]) -> None:
    for session in holder:
        session.close()
