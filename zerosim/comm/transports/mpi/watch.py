"""Whether processes stall: process 0 asks all of them for their state, when its own ranks have done nothing for a
while.

Two identical sets of answers, with no rank able to run anywhere and no header between two processes, are a deadlock,
found within half a second. If the answers stay the same for `timeout_s` while a rank runs and others wait, that rank is
late; so is a process that does not answer. The other processes watch process 0, in case it is stuck.

Source of the rule: Mattern, "Algorithms for distributed termination detection", 1987
(two equal counts of messages sent and received).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from zerosim.comm import diagnostics, rank_status
from zerosim.comm.scheduler import Scheduler
from zerosim.comm.transports.mpi.session import MpiSession

ASK_S = 0.25


class ProcessStatus(NamedTuple):
    """One process's answer: growing counters, whether none of its ranks can run, and its ranks in words."""

    progress: int
    is_stuck: bool
    num_waiting: int
    num_sent: int
    num_received: int
    stands: list[str]


class Watch:
    """One process's view of whether the others are alive. `progress` counts what has happened in this process, `status`
    is its own answer."""

    def __init__(
        self,
        progress: Callable[[], int],
        status: Callable[[], ProcessStatus],
        scheduler: Scheduler,
        session: MpiSession,
        timeout_s: float,
    ) -> None:
        self._count, self._status = progress, status
        self._scheduler = scheduler
        self._session = session
        self._timeout_s = timeout_s
        self._interval = min(ASK_S, timeout_s / 4)
        self._progress = -1
        self._next = self._since = self._heard = time.monotonic()
        self._number = 0  # of the last question
        self._asked: float | None = None  # when, until all have answered
        self._answers: dict[int, ProcessStatus] = {}
        self._before: list[ProcessStatus] = []

    def heard(self, process: int) -> None:
        """Note that a message came from that process."""
        if process == 0:
            self._heard = time.monotonic()
            if self._session.process:
                self._asked = None

    def answered(self, process: int, number: int, answer: ProcessStatus) -> None:
        if number == self._number:
            self._answers[process] = answer

    def step(self, now: float) -> None:
        """Ask or conclude, if it is time."""
        if now < self._next:
            return
        self._next = now + self._interval
        progress = self._count()
        if progress != self._progress:
            self._progress, self._since, self._asked, self._before = progress, now, None, []
        elif self._session.process == 0:
            self._watch_all(now)
        else:
            self._watch_first(now)

    def _watch_all(self, now: float) -> None:
        own = self._status()
        others = self._session.wire.others
        if self._asked is not None:
            silent = [process for process in others if process not in self._answers]
            if silent:
                if now - self._asked >= self._timeout_s:
                    self._late(own, silent)
                return
            answers = [own, *(self._answers[process] for process in others)]
            if answers == self._before:
                self._conclude(now, answers)
            else:
                self._before, self._since = answers, now
        self._number += 1
        self._answers = {}
        self._asked = now
        self._session.tell_all("ask", self._number)

    def _conclude(self, now: float, answers: list[ProcessStatus]) -> None:
        """Conclude, because nothing has happened anywhere between two answers."""
        num_waiting = sum(answer.num_waiting for answer in answers)
        if not num_waiting:
            return
        nothing_between = sum(a.num_sent for a in answers) == sum(a.num_received for a in answers)
        if nothing_between and all(answer.is_stuck for answer in answers):
            self._scheduler.abort(diagnostics.deadlock(num_waiting, _table(answers)))
        elif now - self._since >= self._timeout_s:
            size = len(answers[0].stands)
            running = [
                process * size + index
                for process, answer in enumerate(answers)
                if not answer.is_stuck
                for index, text in enumerate(answer.stands)
                if text.startswith("running")
            ]
            self._scheduler.abort(diagnostics.late(running, self._timeout_s, _table(answers)))

    def _late(self, own: ProcessStatus, silent: list[int]) -> None:
        size = len(own.stands)
        ranks = [process * size + index for process in silent for index in range(size)]
        quiet = ProcessStatus(0, False, 0, 0, 0, ["its process does not answer"] * size)
        answers = [own, *(self._answers.get(process, quiet) for process in self._session.wire.others)]
        if any(answer.num_waiting for answer in answers):
            self._scheduler.abort(diagnostics.late(ranks, self._timeout_s, _table(answers)))

    def _watch_first(self, now: float) -> None:
        """Watch process 0, which asks whenever it is idle. If it does not even answer, its ranks are late."""
        if now - max(self._heard, self._since) < self._timeout_s:
            return
        if self._asked is None:
            self._asked = now
            self._session.tell(0, "ask", 0)
        elif now - self._asked >= self._timeout_s:
            own = self._status()
            size = len(own.stands)
            if own.num_waiting:
                stands = ["its process does not answer"] * size
                stands += ["in another process"] * (size * (self._session.process - 1)) + own.stands
                self._scheduler.abort(diagnostics.late(range(size), self._timeout_s, rank_status.table(stands)))


def _table(answers: list[ProcessStatus]) -> str:
    return rank_status.table([text for answer in answers for text in answer.stands])
