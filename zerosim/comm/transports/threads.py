"""Rounds between threads of one process.

The last to join a round runs every `move`, in rank order, then wakes the sleepers: a round needs one hand-over. The
last to join a round has completed (or seen completed) all earlier rounds of its group.

Calls that differ end in a `Mismatch`; a run that stalls ends in a `Deadlock` or a `LateRank`. Rounds hold arrays, never
Buffers, and drop them when run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from zerosim.backends.kernels import StreamEvent
from zerosim.comm import diagnostics, rank_status
from zerosim.comm.diagnostics import Caller
from zerosim.comm.scheduler import Scheduler, State
from zerosim.comm.transports.rounds import Call, Copied, Exchange, Key, Parts, meet
from zerosim.device.device import Device
from zerosim.device.events import Scope
from zerosim.errors import Mismatch

POLL_S = 0.05


class ThreadRound:
    """One round, from the first to join it to the last to be woken."""

    __slots__ = ("_transport", "call", "done", "events", "exchanges", "first", "key", "num_missing", "sleepers")

    def __init__(self, transport: ThreadTransport, key: Key, call: Call, first: tuple[int, Scope]) -> None:
        self._transport = transport
        self.key = key
        self.call = call
        self.first = first  # the rank that fixed the call, and the place in its program
        self.exchanges: list[Exchange | None] = [None] * len(key.group)
        self.events: list[StreamEvent] = []  # the ends of the members' queues when they joined
        self.num_missing = len(key.group)
        self.sleepers: list[int] = []
        self.done = False

    @property
    def group(self) -> tuple[int, ...]:
        return self.key.group

    @property
    def sequence(self) -> int:
        return self.key.sequence

    def wait(self, rank: int) -> None:
        if not self.done:
            self._transport.sleep(rank, self)

    def copies(self, rank: int) -> Sequence[Copied]:
        return ()

    def missing(self) -> list[int]:
        """Return the ranks that have not joined."""
        return [rank for rank, exchange in zip(self.group, self.exchanges, strict=False) if exchange is None]


def _posted_for(exchanges: Sequence[Exchange], member: int, peer: int) -> Parts:
    return exchanges[peer].part_for(member)


class ThreadTransport:
    """Rounds between threads of one process, one thread per device."""

    is_staged = False

    def __init__(self, devices: Sequence[Device], permits: int = 1, scheduler: Scheduler | None = None) -> None:
        self.devices = devices
        self.scheduler = scheduler or Scheduler(len(devices), permits, devices[0].switch)
        self._rounds: dict[Key, ThreadRound] = {}
        self._sleeps_in: list[ThreadRound | None] = [None] * len(devices)
        self._num_joins = 0

    def join(self, rank: int, key: Key, call: Call, exchange: Exchange) -> ThreadRound:
        self.scheduler.check(rank)
        stream = self.devices[rank].stream
        event = None if stream is None else stream.record_event()
        with self.scheduler.mutex:
            round = self._rounds.get(key)
            if round is None:
                round = self._rounds[key] = self._new_round(key, call, (rank, self.devices[rank].where))
            elif round.call != call:
                raise self._mismatch(rank, call, round)
            round.exchanges[key.group.index(rank)] = exchange
            if event is not None:
                round.events.append(event)
            round.num_missing -= 1
            self._num_joins += 1
            if round.num_missing:
                return round
            del self._rounds[key]
            if self._hand_over(round):
                return round
        self._run(rank, round)
        return round

    def _new_round(self, key: Key, call: Call, first: tuple[int, Scope]) -> ThreadRound:
        return ThreadRound(self, key, call, first)

    def _hand_over(self, round: ThreadRound) -> bool:
        """Hand a complete round over, in the mutex. Return True if another thread than that of the last to join runs
        its moves."""
        return False

    def _run(self, rank: int, round: ThreadRound) -> None:
        """Run every move, on the thread of the last to join; outside the mutex, so that other groups go on.

        When sleepers wake, nothing here holds their arrays any more: a buffer that they free is really freed.
        """
        self._move(rank, round)
        with self.scheduler.mutex:
            round.done = True
            self.scheduler.wake(sorted(round.sleepers))

    def _move(self, rank: int, round: ThreadRound) -> None:
        exchanges = [exchange for exchange in round.exchanges if exchange is not None]
        streams = [stream for stream in (self.devices[peer].stream for peer in round.group) if stream is not None]
        if streams:
            meet(streams, round.events)
        round.exchanges, round.events = [], []
        if calls := [exchange.native for exchange in exchanges if exchange.native]:
            self.devices[rank].backend.native_collective(streams, calls)
        for member, exchange in enumerate(exchanges):
            if exchange.move is not None:
                self.scheduler.check(rank)
                with streams[member].use() if streams else nullcontext():
                    exchange.move(partial(_posted_for, exchanges, member))
        if streams:
            meet(streams, [stream.record_event() for stream in streams])

    def sleep(self, rank: int, round: ThreadRound) -> None:
        """Pass the turn on until `round` is done.

        Raises: Aborted if the run ends first.
        """
        with self.scheduler.mutex:
            self.scheduler.check(rank)  # in the mutex: a later abort finds this rank asleep, and wakes it
            if round.done:
                return
            round.sleepers.append(rank)
            self._sleeps_in[rank] = round
            stuck = self.scheduler.give_way(rank)
        if stuck:
            self._deadlock()
        self.scheduler.sleep(rank)
        self._sleeps_in[rank] = None

    def finish(self, rank: int) -> None:
        """End this rank's program. If others wait and no rank can run, that is a deadlock."""
        if self.scheduler.finish(rank):
            self._deadlock()

    def in_flight(self) -> list[ThreadRound]:
        """Return the rounds that some ranks have joined and others have not, oldest first."""
        with self.scheduler.mutex:
            return list(self._rounds.values())

    def serve(self, timeout_s: float) -> None:
        """Wait for the end, on the caller's thread; a run in which nothing moves for `timeout_s` has a late rank. Looks
        are counted, not the clock: no rank is late because the whole process was stopped (Ctrl-Z), or the machine
        slept."""
        seen, still_s, look_s = -1, 0.0, min(POLL_S, timeout_s / 4)
        while not self.scheduler.wait_for_end(look_s):
            still_s += look_s
            if (progress := self.progress()) != seen:
                seen, still_s = progress, 0.0
            elif still_s >= timeout_s:
                self.report_late(timeout_s)
                still_s = 0.0

    def settle(self) -> BaseException | None:
        """Return how the run ended: its failure, or None."""
        return self.scheduler.failure

    # -- what goes wrong ------------------------------------------------------------------------

    def progress(self) -> int:
        """Return a number that grows as long as any rank does anything."""
        num_finished = sum(state is State.FINISHED for state in self.scheduler.states)
        return self._num_joins + num_finished + sum(device.ticks for device in self.devices)

    def report_late(self, timeout_s: float) -> None:
        """End the run with LateRank after `timeout_s` without progress, if a rank waits for another or for a turn."""
        with self.scheduler.mutex:
            states = self.scheduler.states
            rounds = [round for round in self._sleeps_in if round is not None and not round.done]
            missing = sorted({rank for round in rounds for rank in round.missing()})
            late = [rank for rank in missing if states[rank] is not State.WAITING] or missing
            running = [rank for rank in late or range(len(states)) if states[rank] is State.RUNNING]
            if not late and State.READY in states:
                late = running  # it keeps a turn that others need
            table = self._table()
        if late:
            self.scheduler.abort(diagnostics.late(late, timeout_s, table, rank=(running or late)[0]))

    def _deadlock(self) -> None:
        with self.scheduler.mutex:
            num_waiting = sum(state is State.WAITING for state in self.scheduler.states)
            table = self._table()
        self.scheduler.abort(diagnostics.deadlock(num_waiting, table))

    def _mismatch(self, rank: int, call: Call, round: ThreadRound) -> Mismatch:
        peer, where = round.first
        second, first = Caller(rank, call, self.devices[rank].where), Caller(peer, round.call, where)
        return diagnostics.mismatch(second, first, round.group, round.sequence)

    def _table(self) -> str:
        return rank_status.table([self.stand(rank) for rank in range(len(self.devices))])

    def stand(self, rank: int) -> str:
        """Return a rank's position in words, and what it waits for."""
        state, device, round = self.scheduler.states[rank], self.devices[rank], self._sleeps_in[rank]
        place = rank_status.scope_text(device.where)
        if state is State.FINISHED:
            return "finished"
        if state is State.WAITING and round is not None:
            missing = rank_status.ranks_text(round.missing()) or "nobody"
            what = round.call.describe(rank == round.group[0])
            group = rank_status.numbers_text(round.group)
            return f"waiting in {what} in {place} (number {round.sequence} of group {group}) for {missing}"
        verb = "running" if state is State.RUNNING else "waiting for its turn"
        return f"{verb} in {place}, after {device.ticks} kernels"
