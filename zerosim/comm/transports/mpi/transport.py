"""Rounds between processes: one MPI process holds several ranks as threads, and one thread talks to MPI.

Process p holds ranks p*R .. p*R+R-1. Ranks of one process meet as in a `ThreadTransport`; one thread, the one that
launched, handles messages with other processes (MPI_THREAD_FUNNELED is enough). It starts the rounds of each group one
after the other, in the order in which they were joined, runs the moves of its own ranks in rank order once everything
has arrived, and wakes the sleeping ranks. So sums are added in the same order as with threads, and a process may run
ahead of another.

The order of rounds: `queues.py`; one round: `rounds.py`; stalls: `watch.py`; failures: `session.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import cast

from zerosim.comm import diagnostics, rank_status
from zerosim.comm.scheduler import Scheduler, State
from zerosim.comm.transports.mpi.check import is_gpu_aware
from zerosim.comm.transports.mpi.queues import Queues
from zerosim.comm.transports.mpi.rounds import Remote, RemoteRound
from zerosim.comm.transports.mpi.session import MpiSession, unpack
from zerosim.comm.transports.mpi.staging import GpuAware, Staging, ThroughHost
from zerosim.comm.transports.mpi.watch import ProcessStatus, Watch
from zerosim.comm.transports.mpi.wire import Pause
from zerosim.comm.transports.rounds import Call, Key
from zerosim.comm.transports.threads import ThreadRound, ThreadTransport
from zerosim.device.device import Device, Switch
from zerosim.device.events import Scope

LAST_MESSAGES_S = 0.2
"""MPI delivers messages between two processes in order, but may notice completed sends in any order."""


class LocalScheduler(Scheduler):
    """Turns of this process's ranks; other processes' ranks count as finished."""

    def __init__(self, ranks: int, local: range, permits: int, switch: Switch) -> None:
        super().__init__(ranks, permits, switch)
        self.states = [State.READY if rank in local else State.FINISHED for rank in range(ranks)]
        self._ready = deque(local)
        self._num_unfinished = len(local)


class MpiTransport(ThreadTransport):
    """Rounds of the ranks of one process with each other and with those of other processes.

    `devices` are those of this process's ranks, in rank order. Arrays on a GPU pass through the host, unless the
    library says that it reads a GPU's memory.
    """

    def __init__(
        self,
        session: MpiSession,
        ranks: int,
        devices: Sequence[Device],
        permits: int = 1,
    ) -> None:
        own = {device.rank: device for device in devices}
        self.local = range(devices[0].rank, devices[0].rank + len(devices))
        scheduler = LocalScheduler(ranks, self.local, permits, devices[0].switch)
        # By global rank; the entries of ranks of other processes are never read.
        super().__init__(cast(list[Device], [own.get(rank) for rank in range(ranks)]), permits, scheduler)
        self._session = session
        how = Staging if devices[0].stream is None else GpuAware if is_gpu_aware() else ThroughHost
        self.staging = how(own)
        self.is_staged = self.staging.is_copy
        self.sent_bytes = dict.fromkeys(own, 0)  # by rank, to other processes: payload, without headers
        self._queues = Queues(session, scheduler, own)
        self._remote = Remote(session.wire, self.staging, len(self.local), self.sent_bytes, self._queues.head_of)
        self._outbox: deque[RemoteRound] = deque()  # joined by all members here, not examined yet
        self._pause = Pause()
        self._ended: dict[int, BaseException | None] = {}  # processes, with their failures
        self._adopted: BaseException | None = None
        self._needed_since: float | None = None
        session.begin()

    # -- on the ranks' threads ----------------------------------------------------------------------

    def _new_round(self, key: Key, call: Call, first: tuple[int, Scope]) -> ThreadRound:
        members = [member for member, peer in enumerate(key.group) if peer in self.local]
        if len(members) == len(key.group):
            return super()._new_round(key, call, first)
        return RemoteRound(self, self._remote, key, call, first, members)

    def _hand_over(self, round: ThreadRound) -> bool:
        if not isinstance(round, RemoteRound):
            return False
        self._outbox.append(round)
        self._pause.ring()
        return True

    def finish(self, rank: int) -> None:
        super().finish(rank)
        with self.scheduler.mutex:
            self._pause.ring()

    def _deadlock(self) -> None:
        """Report no deadlock, though no rank runs here, if another process may still send what is awaited."""
        with self.scheduler.mutex:
            if self._outbox or self._queues.open or self._is_busy():
                return
        super()._deadlock()

    # -- on the thread that talks to MPI --------------------------------------------------------------

    def serve(self, timeout_s: float) -> None:
        """Carry rounds until every process has ended, or any process has failed."""
        watch, queues, is_end_sent = (
            Watch(self.progress, self.status, self.scheduler, self._session, timeout_s),
            self._queues,
            False,
        )
        while not self.scheduler.switch.aborted:
            happened = self._collect() | self._hear(watch) | queues.advance()
            self._look_for_the_ended()
            has_ended = self.scheduler.is_over and not self.scheduler.switch.aborted
            if has_ended and not is_end_sent and not self._owes():
                self._session.tell_all("ended", None)
                is_end_sent = True
            if is_end_sent and self._all_ended():
                return
            watch.step(time.monotonic())
            moving = queues.is_moving() or not self._session.wire.is_quiet()
            self._pause.rest(happened, expecting=moving or bool(queues.open), moving=moving)

    def settle(self) -> BaseException | None:
        """End together with all processes. Return the failure that all of them raise, or None."""
        failure = self.scheduler.failure
        own = None if failure is self._adopted else failure
        if failure is not None or not self._all_ended():
            return self._session.settle(own, self._ended)
        # All headers have arrived by now. One that no rank here ever answered is a mistake of the program.
        self._queues.native.close()
        self._session.begin()
        return self._session.settle(self._queues.unanswered(), {})

    def _collect(self) -> bool:
        """Take the rounds that this process's ranks have joined."""
        happened = bool(self._outbox)
        while self._outbox:
            with self.scheduler.mutex:  # so that a rank looking for a deadlock sees the round in one of the two
                round = self._outbox.popleft()
                self._queues.open[round.key] = round
            self._queues.add(round)
        return happened

    def _hear(self, watch: Watch) -> bool:
        happened = False
        while not self.scheduler.switch.aborted and (heard := self._session.hear()) is not None:
            happened = True
            process, note = heard
            watch.heard(process)
            if note.kind == "header":
                self._queues.read(process, note.body)
            elif note.kind == "ended":
                self._end(process, None if note.body is None else unpack(note.body))
            elif note.kind == "ask":
                self._session.tell(process, "answer", (note.body, self.status()))
            elif note.kind == "answer":
                watch.answered(process, *note.body)
        return happened

    def _end(self, process: int, failure: BaseException | None) -> None:
        """End a process: all its ranks have finished, or one of them has failed."""
        self._ended[process] = failure
        if failure is not None:
            self._adopted = failure
            self.scheduler.abort(failure)

    def _all_ended(self) -> bool:
        return len(self._ended) == self._session.processes - 1

    def _owes(self) -> bool:
        """Return whether rounds can still end that need this process, though none of its ranks waits for them."""
        going = [process for process in self._session.wire.others if process not in self._ended]
        rounds = self._queues.open.values()
        return bool(self._outbox) or any(round.native or any(map(round.needs, going)) for round in rounds)

    def _look_for_the_ended(self) -> None:
        """Find ranks that wait for a process that has ended; its last messages may still arrive."""
        if not any(self._queues.need(process) for process in self._ended):
            self._needed_since = None
            return
        now = time.monotonic()
        self._needed_since = self._needed_since or now
        if now - self._needed_since > LAST_MESSAGES_S:
            with self.scheduler.mutex:
                num_waiting = sum(state is State.WAITING for state in self.scheduler.states)
                table = self._table()
            if num_waiting:
                self.scheduler.abort(diagnostics.deadlock(num_waiting, table))

    def report_late(self, timeout_s: float) -> None:
        """Do nothing: `Watch`, which knows all processes, reports late ranks."""

    # -- where everybody stands -------------------------------------------------------------------------

    def progress(self) -> int:
        ticks = sum(self.devices[rank].ticks for rank in self.local)
        num_finished = sum(self.scheduler.states[rank] is State.FINISHED for rank in self.local)
        return self._num_joins + num_finished + ticks

    def _is_busy(self) -> bool:
        """Return whether a rank of this process runs, or only waits for its turn."""
        return any(self.scheduler.states[rank] in (State.RUNNING, State.READY) for rank in self.local)

    def status(self) -> ProcessStatus:
        """Return the state of this process's ranks, for the watching process."""
        with self.scheduler.mutex:
            rounds = self._queues.open.values()
            return ProcessStatus(
                progress=self.progress(),
                is_stuck=not (self._outbox or self._is_busy() or any(round.is_arriving for round in rounds)),
                num_waiting=[self.scheduler.states[rank] for rank in self.local].count(State.WAITING),
                num_sent=self._queues.num_sent,
                num_received=self._queues.num_received,
                stands=[self.stand(rank) for rank in self.local],
            )

    def _table(self) -> str:
        stands = [self.stand(rank) if rank in self.local else self._afar(rank) for rank in range(len(self.devices))]
        return rank_status.table(stands)

    def _afar(self, rank: int) -> str:
        """Return what is known here of a rank of another process."""
        process = self._remote.process_of(rank)
        has_finished = process in self._ended and self._ended[process] is None
        return "finished" if has_finished else "in another process"
