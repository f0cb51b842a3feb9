"""Turns by hand: a rank runs from one event to the next and then waits for a controller.

Before each event a rank announces it (`pause`) and sleeps. The controller, on another thread, looks around and lets one
rank go on (`grant`), which performs that event and the code after it until its next event. So every rank stands still
between two events while the controller looks.

The controller decides which rank goes next (`stepper/`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from zerosim.comm.scheduler import Scheduler, State
from zerosim.device.device import Switch
from zerosim.device.events import Event
from zerosim.device.recorder import Reader, Recorder


class SteppedScheduler(Scheduler):
    """A scheduler whose ranks run on command, one at a time.

    `pending` is the event that a paused rank is about to perform. `woken` are ranks that may run but are not at an
    event yet: at their start, or after a wait. The controller lets them run up to their next event.
    """

    def __init__(self, ranks: int, switch: Switch) -> None:
        super().__init__(ranks, 1, switch)
        self._ready.clear()
        self.woken = deque(range(ranks))
        self.pending: list[Event | None] = [None] * ranks
        self._stopped = threading.Semaphore(0)

    def pause(self, rank: int, event: Event) -> None:
        """Stop before `event` until granted. Called on the rank's thread.

        Raises: Aborted if the run ends first.
        """
        with self.mutex:
            self.check(rank)
            self.pending[rank] = event
            self.states[rank] = State.READY
            self._num_running -= 1
            self._free_permits += 1
        self._stopped.release()
        self.sleep(rank)

    def grant(self, rank: int) -> None:
        """Let a READY rank run, and return when it has stopped again. Called on the controller's thread."""
        with self.mutex:
            if self.switch.aborted:
                return
            assert self.states[rank] is State.READY, f"rank {rank} is {self.states[rank]}"
            self.states[rank] = State.RUNNING
            self.pending[rank] = None
            self._num_running += 1
            self._free_permits -= 1
            self._turns[rank].release()
        self._stopped.acquire()

    def wake(self, ranks: Iterable[int]) -> None:
        if self.switch.aborted:
            return
        for rank in ranks:
            self.states[rank] = State.READY
            self.woken.append(rank)

    def abort(self, failure: BaseException) -> None:
        super().abort(failure)
        self._stopped.release()

    def _release_permit(self) -> bool:
        self._num_running -= 1
        self._free_permits += 1
        self._stopped.release()
        return State.READY not in self.states and self._num_unfinished > 0

    def _dispatch(self) -> None:
        """Run no rank that is not granted."""


class SteppedRecorder(Recorder):
    """A recorder that stops its rank before each event. Readers get each event at once."""

    def __init__(self, rank: int, scheduler: SteppedScheduler, readers: tuple[Reader, ...]) -> None:
        super().__init__(readers, keep=True)
        self.rank = rank
        self.thread = 0  # the rank's own thread; set by its program
        self._scheduler = scheduler

    def add(self, event: Event) -> None:
        self.settle()
        self.put(event)

    def put(self, event: Event) -> None:
        if self._scheduler.switch.aborted:
            return  # the record ends with the run: buffers freed while threads unwind are left out
        if threading.get_ident() == self.thread:
            self._scheduler.pause(self.rank, event)
        super().put(event)
        self.feed()
