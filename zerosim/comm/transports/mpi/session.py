"""One process among those that mpirun started: what all of them do together outside of rounds.

Processes do the same things in the same order: a launch, an exchange of its results, the next launch. Each is an epoch.
In any epoch a process may find that another has failed: then all end with the same error, the lowest process's, so that
one of them prints it and all return its code. A process that does not answer within a few seconds after a failure ends
the job by `MPI_Abort`.

Messages: `wire.py`; rounds: `transport.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from functools import cache
from typing import Any, TypeVar

from zerosim.comm import rank_status
from zerosim.comm.transports.mpi.check import check_mpi, check_world
from zerosim.comm.transports.mpi.wire import Note, Pause, Wire
from zerosim.errors import InputError, RankFailed, described, exit_code, message_of

T = TypeVar("T")

ANSWER_S = 20.0
"""How long the others may take to answer after a failure."""

LATE_S = 30.0
"""After how long processes that have not come to an exchange are named; they may still come."""

LONGER_S = 3.0
"""How much longer each waits for the one before it, which prints the error, to end the job."""

PARENT_POLL_S = 0.5
ALONE_S = 10.0
"""How long a process whose parent is gone may take to end."""


class RemoteTraceback(Exception):
    """The traceback of another process's error, as text: the cause of its copy here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class MpiSession:
    """This process and its peers. For one thread only."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.process = self.wire.process
        self.processes = self.wire.processes
        self.is_broken = False  # a peer no longer answers
        self.agreed: BaseException | None = None  # the last error with which all processes ended something
        self._epoch = 0
        self._early: list[tuple[int, Note]] = []
        self._unfinished: list[Any] = []  # messages left over after a failure, and their bytes
        _end_with_parent()

    def check_world(self, ranks: int, per_process: int) -> None:
        """Check the world's size. Raises: InputError if these processes do not hold so many ranks."""
        check_world(self.processes, ranks, per_process)

    def begin(self) -> None:
        """Enter the next epoch."""
        self._epoch += 1

    def hear(self, ending: bool = False) -> tuple[int, Note] | None:
        """Return the next note of this epoch, or a failure in any epoch; notes of later epochs wait, those of earlier
        ones are dropped.

        A failure moves this process to its epoch. `ending`: every process's end counts, whatever its epoch.
        """
        for index, (_, note) in enumerate(self._early):
            if self._is_due(note, ending):
                return self._early.pop(index)
        while (heard := self.wire.hear()) is not None:
            if self._is_due(heard[1], ending):
                return heard
            if heard[1].epoch > self._epoch:
                self._early.append(heard)
        return None

    def _is_due(self, note: Note, ending: bool) -> bool:
        if note.kind == "ended" and (ending or note.body is not None):
            self._epoch = max(self._epoch, note.epoch)
            return True
        return note.epoch == self._epoch

    def tell(self, process: int, kind: str, body: Any) -> None:
        self.wire.tell(process, Note(self._epoch, kind, body))

    def tell_all(self, kind: str, body: Any) -> None:
        for process in self.wire.others:
            self.tell(process, kind, body)

    # -- objects ----------------------------------------------------------------------------------

    def exchange(self, value: T) -> list[T]:
        """Give each process's value to all of them, by process. Any size.

        Raises: the error of a process that failed meanwhile.
        """
        self.begin()
        data = pickle.dumps(value, protocol=5)
        values: list[Any] = [None] * self.processes
        values[self.process] = value
        requests: list[Any] = []
        for process in self.wire.others:
            tag = self.wire.new_tag()  # a new tag: messages left over after a failure must not be taken for others
            self.tell(process, "object", (tag, len(data)))
            requests += self.wire.send(process, tag, data)
        arriving: dict[int, tuple[bytearray, list[Any]]] = {}
        awaited, pause, late = set(self.wire.others), Pause(), time.monotonic() + LATE_S
        while awaited or arriving or not self.wire.are_done(requests) or not self.wire.is_quiet():
            heard = self.hear()
            if heard is not None:
                source, note = heard
                if note.kind == "ended" and note.body is not None:
                    self._unfinished.append((requests, data, arriving))  # MPI may still read and write them
                    failure = self.settle(None, {source: unpack(note.body)})
                    assert failure is not None
                    raise failure
                if note.kind == "object":
                    tag, size = note.body
                    into = bytearray(size)
                    arriving[source] = into, self.wire.receive(source, tag, into)
                    awaited.discard(source)
            if awaited and time.monotonic() > late:
                if awaited.issuperset(range(self.process)):  # the first of the waiting processes says so
                    _say_who_is_late(self.process, awaited)
                late = float("inf")
            arrived = [source for source, (_, in_flight) in arriving.items() if self.wire.are_done(in_flight)]
            for source in arrived:
                values[source] = pickle.loads(arriving.pop(source)[0])
            pause.rest(heard is not None or bool(arrived), expecting=True)
        return values

    # -- how it ends ------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> BaseException:
        """Tell the others that this process failed outside of any launch. Return the error that all of them end
        with."""
        self.begin()
        return self.settle(error, {}) or error

    def settle(self, own: BaseException | None, others: dict[int, BaseException | None]) -> BaseException | None:
        """End an epoch together with all processes. Return the failure of the lowest one, None if none has failed.

        `others` are those whose end is known, with their failures.
        """
        ended = dict(others)
        if not self.is_broken:
            self.tell_all("ended", None if own is None else pack(own))
            self._await_all(own, ended)
        failure = _lowest({**ended, self.process: own})
        if failure is not None:
            self.agreed = failure
            _locate(failure, {**ended, self.process: own})
        return failure

    def _await_all(self, own: BaseException | None, ended: dict[int, BaseException | None]) -> None:
        """Wait for the end of every process; once one has failed, only for a few seconds."""
        pause, since = Pause(), None
        failure = _lowest({**ended, self.process: own})
        while len(ended) < self.processes - 1 or not self.wire.is_quiet():
            heard = self.hear(ending=failure is not None)
            if heard is not None and heard[1].kind == "ended":
                ended[heard[0]] = None if heard[1].body is None else unpack(heard[1].body)
            failure = _lowest({**ended, self.process: own})
            if failure is not None:
                since = since or time.monotonic()
                if time.monotonic() - since > ANSWER_S + LONGER_S * self._turn(ended):
                    self._break(failure)
                    return
            pause.rest(heard is not None, expecting=True)

    def _turn(self, ended: dict[int, BaseException | None]) -> int:
        """Return after how many others this process ends the job: process 0 first, then the first one that has
        ended."""
        return 0 if self.process == 0 else 1 if self.process < min(ended, default=self.processes) else 2

    def _break(self, failure: BaseException) -> None:
        """End the job because a peer is gone or stuck; process 0 ends it at its exit, so that it can still print the
        reason."""
        self.is_broken = True
        code = exit_code(failure)
        if self.process:  # process 0 is stuck, or is about to end this one
            _say(f"error: {message_of(failure)}")
            self.wire.world.Abort(code)
        atexit.register(_abort, self.wire, code)


@cache
def mpi_session() -> MpiSession:
    """Return the session of this process: MPI starts once.

    Raises: InputError if there is no MPI, or mpirun did not start this process.
    """
    check_mpi()
    return MpiSession()


def pack(error: BaseException) -> bytes:
    """Return an error as bytes, with its traceback as text; one that cannot be pickled becomes a RankFailed with the
    same message."""
    text = "".join(traceback.format_exception(error))
    try:
        data = pickle.dumps((error, text))
        pickle.loads(data)
    except Exception:  # whatever another author's exception raises while it is pickled
        rank = getattr(error, "rank", None)
        data = pickle.dumps((RankFailed(described(error), rank=rank), text))
    return data


def unpack(data: bytes) -> BaseException:
    error, text = pickle.loads(data)
    assert isinstance(error, BaseException)
    error.__cause__ = RemoteTraceback(text)
    return error


def _lowest(failures: dict[int, BaseException | None]) -> BaseException | None:
    """Return the failure of the lowest process; an interruption only if there is nothing else."""
    found = [error for _, error in sorted(failures.items()) if error is not None]
    return next((error for error in found if isinstance(error, Exception)), found[0] if found else None)


def _say_who_is_late(process: int, awaited: set[int]) -> None:
    late = rank_status.numbers_text(sorted(awaited))
    who = f"process {late} has" if len(awaited) == 1 else f"processes {late} have"
    _say(f"process {process} waits, but {who} not arrived for {LATE_S:g} s; did the program end there?")


def _say(text: str) -> None:
    """Print to the process's own stderr: a command prints only the first process's words, but these must be seen."""
    if sys.__stderr__ is not None:
        with contextlib.suppress(OSError):
            print(f"zerosim: {text}", file=sys.__stderr__, flush=True)


def _locate(failure: BaseException, ended: dict[int, BaseException | None]) -> None:
    """Add the process's number to bad input that only some processes have."""
    process = next(process for process, error in ended.items() if error is failure)
    if process and isinstance(failure, InputError):
        failure.args = (f"{message_of(failure)} (in process {process}, of {len(ended)})",)


def _abort(wire: Wire, code: int) -> None:
    sys.stdout.flush()
    wire.world.Abort(code)


def _end_with_parent() -> None:
    """End this process when its parent is gone (mpirun was killed): nothing else would."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)  # a run removes its files on it; without files it ends at once
        time.sleep(ALONE_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
