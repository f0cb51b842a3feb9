"""Limits on an answer's time and its ranks' events; waiting that long, and ending its threads.

    PATIENCE_S    without any kernel or collective (or the return of a function): ended inside, with its line
    LIMIT_S       for all of an exercise's runs: ended inside, with its line
    SILENCE_S     without any sign of the process: it holds the interpreter, and is ended from outside (`process.py`)
    EVENTS_PER_STEP   of one rank; graded runs need at most about a tenth of it

Looks are counted, not the clock: a machine that slept does not make an answer slow.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from zerosim.device.device import Switch
from zerosim.device.events import Event, Free
from zerosim.device.recorder import Recorder
from zerosim.errors import InputError
from zerosim.grading.own_code import OwnLines, error_words, line_of_frame, line_of_trace, text_of

POLL_S = 0.05
PATIENCE_S = 1.5
LIMIT_S = 30.0
SILENCE_S = 5.0
EVENTS_PER_STEP = 10_000
_MOST_REFUSED = 100  # code that unwinds may try a few more; more than this means that it swallowed the error


class Over(BaseException):
    """Ends a thread of a run that has ended. Not an Exception: a strategy's own `except Exception` must not stop it."""


class Failure(NamedTuple):
    """Why an answer ended early: the first failure.

    reason   unsolved, deadlock, mismatch, stuck, endless, late or error
    text     one line, with the place in the program
    line     the student's own line that ran then, or ''
    rank     the rank that failed, in a run
    """

    reason: str
    text: str
    line: str = ""
    rank: int = 0

    @classmethod
    def unsolved(cls, error: NotImplementedError, line: str, rank: int = 0) -> Failure:
        return cls("unsolved", text_of(error) or "what raises NotImplementedError", line, rank)


class Lap:
    """Seconds since the last look, but at most one: without looks nothing ran."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def seconds(self) -> float:
        last, self._last = self._last, time.monotonic()
        return min(self._last - last, 1.0)


class Watch:
    """Waits for an answer, and adds up its time; `beat` is called at each look, as a sign of life."""

    def __init__(self, beat: Callable[[], None] = lambda: None) -> None:
        self.beat = beat
        self._lap = Lap()
        self._passed_s = 0.0

    def wait(
        self,
        has_ended: Callable[[float], bool],
        progress: Callable[[], object],
        bound: Callable[[], Failure | None] = lambda: None,
    ) -> Failure | None:
        """Wait until `has_ended` (given seconds, as a lock is). Return a reason not to wait any longer, or None."""
        seen, still = None, 0
        while not has_ended(POLL_S):
            self._passed_s += self._lap.seconds()
            self.beat()
            now = progress()
            if self._passed_s >= LIMIT_S:
                return Failure("late", f"did not end within {LIMIT_S:g} s")
            if (stop := bound()) is not None:
                return stop
            if now != seen:
                seen, still = now, 0
            elif still * POLL_S >= PATIENCE_S:
                return Failure("stuck", f"did nothing for {PATIENCE_S:g} s")
            still += 1
        return None


def raise_in(threads: Iterable[int], error: type[BaseException] = Over) -> None:
    """Put an exception into a thread at its next line of Python: a thread in an endless loop checks no flag."""
    for thread in threads:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def end_threads(left: Callable[[], Iterable[int]], error: type[BaseException] = Over) -> None:
    """End the threads that are `left`. One may swallow the exception; one in C code has no next line: see
    `process.py`."""
    for _ in range(20):
        threads = list(left())
        if not threads:
            return
        raise_in(threads, error)
        time.sleep(POLL_S)


def called(function: Callable[[], Any], watch: Watch, progress: Callable[[], object]) -> tuple[Any, Failure | None]:
    """Call a function that may do anything, in its own thread, which is ended if it does not end. Return its value, or
    the failure.

    `progress` returns another value as long as the function gets on.
    """
    came: list[tuple[Any, Failure | None]] = []

    def call() -> None:
        try:
            came.append((function(), None))
        except NotImplementedError as error:
            came.append((None, Failure.unsolved(error, line_of_trace(error.__traceback__))))
        except BaseException as error:  # SystemExit too
            words = f"raised {error_words(error)}"
            came.append((None, Failure("error", words, line_of_trace(error.__traceback__))))

    def has_ended(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    number = thread.ident or 0
    try:
        stopped = watch.wait(has_ended, progress)
        line = line_of_frame(sys._current_frames().get(number))
    finally:
        end_threads(lambda: [number] if thread.is_alive() else [])
    return came[0] if stopped is None else (None, stopped._replace(line=line))


class Endless(Over):
    """A rank had more events than any solution needs."""


class BoundedRecorder(Recorder):
    """Records everything up to a limit, and ends with the run: buffers that threads free while they unwind are left
    out."""

    def __init__(self, switch: Switch, limit: int) -> None:
        super().__init__(keep=True)
        self.own = OwnLines()
        self.lines: list[int] = []  # by event, the index in `own.sources` of the answer's line that led to it
        self._switch = switch
        self._limit = limit
        self._added = 0
        self._refused = 0

    @property
    def goes_on(self) -> bool:
        """Whether its rank had far too many events and did not end for it."""
        return self._refused > _MOST_REFUSED

    @property
    def count(self) -> int:
        return len(self.history) + len(self.events)

    @property
    def enabled(self) -> bool:
        return True

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if not value:
            raise InputError("the record is graded and cannot be switched off")

    @property
    def is_whole(self) -> bool:
        """Whether every added event is there."""
        return self.count == self._added

    def add(self, event: Event) -> None:
        self.settle()
        self.put(event)

    def put(self, event: Event) -> None:
        is_free = isinstance(event, Free)  # may be recorded while a thread unwinds
        if self._switch.aborted:
            if is_free:
                return
            raise Over
        super().put(event)
        self.lines.append(-1 if is_free else self.own.place(sys._getframe(1)))
        self._added += 1
        if self._added > self._limit and not is_free:
            self._refused += 1
            raise Endless(f"{self.count:,} events, and no end is in sight")
