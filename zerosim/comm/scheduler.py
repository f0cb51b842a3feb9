"""Turns: K permits, and one lock per rank to sleep on.

With one permit the ranks run one at a time, in the same order in every run: first 0, 1, ..., N-1, then in the order in
which they were woken (those woken together in rank order). With K permits up to K ranks run side by side. A rank gets
its turn when its own lock is released: one wake-up per hand-over, however many ranks sleep (a Condition or a Barrier
would wake them all).

Why a rank sleeps: `transports/threads.py`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from enum import StrEnum

from zerosim.device.device import Switch
from zerosim.errors import Aborted


class State(StrEnum):
    """A rank's state, as far as turns are concerned."""

    READY = "ready"  # can run, and waits for its turn
    RUNNING = "running"
    WAITING = "waiting"  # sleeps until `wake`
    FINISHED = "finished"


class Scheduler:
    """Hand out turns. Methods marked "mutex held" are called inside `with scheduler.mutex`."""

    def __init__(self, ranks: int, permits: int, switch: Switch) -> None:
        self.mutex = threading.Lock()
        self.is_over = False  # every rank has finished, or the run was aborted
        self.switch = switch
        self.failure: BaseException | None = None
        self.states = [State.READY] * ranks
        self._ready = deque(range(ranks))
        self._free_permits = permits
        self._num_running = 0
        self._num_unfinished = ranks
        self._turns = [threading.Lock() for _ in range(ranks)]
        # Held until the run is over. An Event takes its lock in Python code, where Ctrl-C could leave it held for good.
        self._end = threading.Lock()
        for lock in (*self._turns, self._end):
            lock.acquire()

    def begin(self) -> None:
        """Hand out the first turns."""
        with self.mutex:
            self._dispatch()

    def sleep(self, rank: int) -> None:
        """Sleep until this rank's turn comes (at its start, or after `give_way`).

        Raises: Aborted if the run has ended meanwhile.
        """
        self._turns[rank].acquire()
        self.check(rank)

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait until the run is over, at most `timeout_s`; return whether it is."""
        return self.is_over or self._end.acquire(timeout=timeout_s)

    def check(self, rank: int) -> None:
        """Raise Aborted if the run has been ended."""
        if self.switch.aborted:
            raise Aborted(f"rank {rank} was ended because another rank failed or the run was interrupted")

    def give_way(self, rank: int) -> bool:
        """Pass the turn on before this rank sleeps. Return True if no rank is left to run (mutex held)."""
        self.states[rank] = State.WAITING
        return self._release_permit()

    def wake(self, ranks: Iterable[int]) -> None:
        """Make these ranks ready again, in the order given (mutex held)."""
        if self.switch.aborted:
            return  # `abort` has already woken them, each once
        for rank in ranks:
            self.states[rank] = State.READY
            self._ready.append(rank)
        self._dispatch()

    def finish(self, rank: int) -> bool:
        """End this rank's program. Return True if others wait and no rank is left to run."""
        with self.mutex:
            self.states[rank] = State.FINISHED
            self._num_unfinished -= 1
            if self._num_unfinished == 0:
                self._set_over()
            return self._release_permit()

    def abort(self, failure: BaseException) -> None:
        """End the run: store the first failure, and wake every sleeper once to raise Aborted."""
        with self.mutex:
            if self.switch.aborted:
                return
            self.failure = failure
            self.switch.aborted = True
            self._ready.clear()
            for rank, state in enumerate(self.states):
                if state in (State.READY, State.WAITING):
                    self._turns[rank].release()
            self._set_over()

    def _set_over(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._end.release()

    def _release_permit(self) -> bool:
        self._num_running -= 1
        self._free_permits += 1
        self._dispatch()
        return self._num_running == 0 and self._num_unfinished > 0

    def _dispatch(self) -> None:
        while self._ready and self._free_permits > 0:
            rank = self._ready.popleft()
            self.states[rank] = State.RUNNING
            self._num_running += 1
            self._free_permits -= 1
            self._turns[rank].release()
