"""In which order rounds between processes run, on the one thread that talks to MPI.

The rounds of a group run one after the other, in the order in which this process joined them; groups do not wait for
each other. Headers of other processes arrive at any time. Headers for a later round wait; headers for a finished round
do not match what was called in it.

One round's messages: `rounds.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial

from zerosim.comm import diagnostics
from zerosim.comm.diagnostics import Caller
from zerosim.comm.scheduler import Scheduler
from zerosim.comm.transports.mpi.native import NativeCall, NativeEngine
from zerosim.comm.transports.mpi.rounds import Header, RemoteRound
from zerosim.comm.transports.mpi.session import MpiSession
from zerosim.comm.transports.rounds import Key, meet
from zerosim.device.device import Device
from zerosim.dtypes import dtype as get_dtype
from zerosim.errors import Deadlock, RankFailed, ZerosimError, described

REMEMBERED = 256
"""Finished calls that are remembered, to name the one that a late header does not match."""


class Queues:
    """The rounds of this process that other processes take part in. `devices` are this process's own, by rank."""

    def __init__(self, session: MpiSession, scheduler: Scheduler, devices: Mapping[int, Device]) -> None:
        backend = next(iter(devices.values())).backend
        self.native = NativeEngine(session.wire, backend)
        self.open: dict[Key, RemoteRound] = {}  # changed under the scheduler's mutex, because ranks read it too
        self.num_sent = self.num_received = 0
        self._session = session
        self._scheduler = scheduler
        self._devices = devices
        self._queues: dict[tuple[int, tuple[int, ...]], deque[RemoteRound]] = {}  # the first of each is in flight
        self._early: dict[Key, list[tuple[int, Header]]] = {}
        self._calls: dict[Key, Caller] = {}  # of finished rounds

    def add(self, round: RemoteRound) -> None:
        """Add a round that all members here have joined; `open` has it."""
        queue = self._queues.setdefault(round.key[:2], deque())
        queue.append(round)
        if len(queue) == 1:
            self._start(round)

    def read(self, process: int, header: Header) -> None:
        """Read a header: for a round in flight here, for a later one, or of a call that does not match."""
        self.num_received += 1
        round = self.open.get(header.key)
        if header.key in self._calls:
            self._clash(header, self._calls[header.key])
        elif round is not None and self.head_of(round) is round:
            self._take(round, process, header)
        else:
            self._early.setdefault(header.key, []).append((process, header))
            if round is not None and round.call != header.call:
                self._clash(header, _caller(round))

    def advance(self) -> bool:
        """Finish the rounds whose messages have all arrived and left, and start the next ones. Return whether any
        did."""
        happened = False
        for key, queue in list(self._queues.items()):
            while queue and not self._scheduler.switch.aborted and self._is_over(queue[0]):
                self._finish(queue[0])
                queue.popleft()
                happened = True
                if queue:
                    self._start(queue[0])
            if not queue:
                del self._queues[key]
        return happened

    def is_moving(self) -> bool:
        """Return whether large parts are in flight. Only the first round of a group can be in flight."""
        return any(queue[0].is_moving for queue in self._queues.values() if queue)

    def unanswered(self) -> Deadlock | None:
        """Return the error of a rank elsewhere that called something which ranks here have never joined."""
        header = next((header for headers in self._early.values() for _, header in headers), None)
        if header is None:
            return None
        _, group, sequence, _ = header.key
        missing = [rank for rank in group if rank in self._devices]
        return diagnostics.unanswered(Caller(header.rank, header.call, header.where), group, sequence, missing)

    def head_of(self, round: RemoteRound) -> RemoteRound:
        """Return the round that this one waits for: the first of its group, perhaps itself."""
        queue = self._queues.get(round.key[:2])
        return queue[0] if queue else round

    def need(self, process: int) -> bool:
        """Return whether a round in flight awaits something of this process."""
        return any(queue[0].needs(process) for queue in self._queues.values() if queue)

    def _start(self, round: RemoteRound) -> None:
        for process, header in round.open():
            self._session.tell(process, "header", header)
            self.num_sent += 1
        for process, header in self._early.pop(round.key, ()):
            self._take(round, process, header)

    def _take(self, round: RemoteRound, process: int, header: Header) -> None:
        if header.call == round.call:
            round.take(process, header)
        else:
            self._clash(header, _caller(round))

    def _clash(self, header: Header, here: Caller) -> None:
        """Return the error of two different calls. The lower rank is named first, whichever process this is."""
        first, second = sorted([here, Caller(header.rank, header.call, header.where)], key=lambda caller: caller.rank)
        self._scheduler.abort(diagnostics.mismatch(second, first, header.key.group, header.key.sequence))

    def _is_over(self, round: RemoteRound) -> bool:
        if not round.is_complete():
            return False
        exchange = round.exchanges[round.local[0]]
        if exchange is None or exchange.native is None:
            return True
        try:
            if round.native is None:
                round.native = NativeCall(self.native, round.group, exchange.native, get_dtype(round.call.dtype))
            return round.native.is_done()
        except Exception as error:
            self._scheduler.abort(_explained(round, round.local[0], error))
            return False

    def _finish(self, round: RemoteRound) -> None:
        """Run the moves of this process's members and wake the waiting ranks; nothing here holds their arrays
        afterwards."""
        if not self._moved(round):
            return
        self._calls[round.key] = _caller(round)
        if len(self._calls) > REMEMBERED:
            del self._calls[next(iter(self._calls))]
        round.exchanges = []
        round.inbox.clear()
        with self._scheduler.mutex:
            del self.open[round.key]
            round.done = True
            self._scheduler.wake(sorted(round.sleepers))

    def _moved(self, round: RemoteRound) -> bool:
        """Run the moves, in rank order. Return False if one failed, which ends the run."""
        own = [self._devices[round.group[member]].stream for member in round.local]
        streams = [stream for stream in own if stream is not None]
        round.take_arrived()
        if streams:
            meet(streams, round.events)
        for index, member in enumerate(round.local):
            exchange = round.exchanges[member]
            if exchange is None or exchange.move is None:
                continue
            try:
                with streams[index].use() if streams else nullcontext():
                    exchange.move(partial(round.posted_for, member))
            except Exception as error:
                self._scheduler.abort(_explained(round, member, error))
                return False
        if streams:
            meet(streams, [stream.record_event() for stream in streams])
        return True


def _caller(round: RemoteRound) -> Caller:
    rank, where = round.first
    return Caller(rank, round.call, where)


def _explained(round: RemoteRound, member: int, error: Exception) -> ZerosimError:
    if isinstance(error, ZerosimError):
        return error
    rank = round.group[member]
    failed = RankFailed(f"rank {rank} failed in {round.call.op}: {described(error)}", rank=rank)
    failed.__cause__ = error
    return failed
