"""Notes (small pickled messages) and bytes between processes over MPI; one thread only.

Everything is non-blocking and polled. Notes travel on their own communicator, in order between two processes; bytes
travel under a tag that a note has named, so the receiver knows what it takes. A run of bytes is cut where MPI counts in
32 bits.

Contents of notes: `session.py`, `transport.py`. mpi4py is imported when a wire is made: that starts MPI.
"""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any, NamedTuple

CHUNK_BYTES = 1 << 30
"""The most bytes of one MPI message; MPI_BYTE counts below 2**31."""

SPINS = 40
SHORTEST_S = 50e-6
LONGEST_S = 200e-6
IDLE_S = 5e-3

NO_TAG = 0
"""The tag of a part within its note; other tags begin at 1."""


class Note(NamedTuple):
    """One small message. `epoch` numbers the common actions of all processes: a launch, an exchange."""

    epoch: int
    kind: str
    body: Any


class Wire:
    """This process's ends of all links."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi: Any = MPI
        self.world: Any = MPI.COMM_WORLD
        self.process: int = self.world.Get_rank()
        self.processes: int = self.world.Get_size()
        self._notes: Any = self.world.Dup()
        self._bytes: Any = self.world.Dup()
        self.collective: Any = self.world.Dup()
        self._status: Any = MPI.Status()
        self._in_flight: list[tuple[Any, bytes]] = []
        tags: Any = self._bytes.Get_attr(MPI.TAG_UB)
        self._num_tags = int(tags)
        self._tag = NO_TAG

    @property
    def others(self) -> list[int]:
        return [process for process in range(self.processes) if process != self.process]

    def tell(self, process: int, note: Note) -> None:
        """Send a note; it leaves without further calls, as long as `hear` is called now and then."""
        data = pickle.dumps(tuple(note), protocol=5)
        self._in_flight.append((self._notes.Isend([data, self.mpi.BYTE], process, 0), data))

    def hear(self) -> tuple[int, Note] | None:
        """Return the next note, and the process that sent it."""
        if self._in_flight:
            self._in_flight = [pair for pair in self._in_flight if not pair[0].Test()]
        message = self._notes.Improbe(self.mpi.ANY_SOURCE, 0, self._status)
        if message is None:
            return None
        source = self._status.Get_source()
        data = bytearray(self._status.Get_count(self.mpi.BYTE))
        message.Recv([data, self.mpi.BYTE])
        return source, Note(*pickle.loads(data))

    def new_tag(self) -> int:
        """Return a tag that no message of this process in flight has."""
        self._tag = self._tag % (self._num_tags - 1) + 1
        return self._tag

    def send(self, process: int, tag: int, data: Any) -> list[Any]:
        """Send these contiguous bytes, which must stay unchanged until the returned requests are done."""
        return [self._bytes.Isend([run, self.mpi.BYTE], process, tag) for run in _runs(data)]

    def receive(self, process: int, tag: int, data: Any) -> list[Any]:
        """Receive what `send` sent under that tag into these contiguous bytes. Return the requests."""
        return [self._bytes.Irecv([run, self.mpi.BYTE], process, tag) for run in _runs(data)]

    def are_done(self, requests: list[Any]) -> bool:
        return not requests or bool(self.mpi.Request.Testall(requests))

    def is_quiet(self) -> bool:
        """Return whether every note has left."""
        self._in_flight = [pair for pair in self._in_flight if not pair[0].Test()]
        return not self._in_flight


def _runs(data: Any) -> list[Any]:
    view = data if hasattr(data, "__cuda_array_interface__") else memoryview(data)
    return [view[start : start + CHUNK_BYTES] for start in range(0, view.nbytes, CHUNK_BYTES)]


class Pause:
    """How long a polling thread rests: not at all while something happens, then longer and longer.

    It sleeps on a bell, not on the clock: work from this process's own ranks wakes it at once.
    """

    def __init__(self) -> None:
        self._bell = threading.Lock()
        self._bell.acquire()
        self._num_empty = 0
        self._delay = SHORTEST_S

    def ring(self) -> None:
        """Wake the sleeper, from any thread (callers take turns by their own mutex)."""
        if self._bell.locked():
            self._bell.release()

    def rest(self, happened: bool, expecting: bool, moving: bool = False) -> None:
        """Rest for a suitable time: whether anything `happened` since the last rest, whether a message is expected, and
        whether bytes are `moving`, which many libraries carry on only while they are called.
        """
        if happened:
            self._num_empty, self._delay = 0, SHORTEST_S
            return
        self._num_empty += 1
        if not expecting:
            self._bell.acquire(timeout=IDLE_S)
        elif self._num_empty < SPINS:
            time.sleep(0)  # ranks of this and of other processes may need the core
        else:
            self._bell.acquire(timeout=self._delay)
            self._delay = min(2 * self._delay, SHORTEST_S if moving else LONGEST_S)
