"""In which order rounds between processes run, on the one thread that talks to MPI.

The rounds of a group run one after the other, in the order in which they were joined here; groups do not wait for
each other. Letters of other processes come when they come: those for a later round wait, those for a round that is
over do not fit what was called in it.

Owns queues, letters and moves. One round's messages are `rounds.py`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial

from zerosim.comm import complaints
from zerosim.comm.complaints import Caller
from zerosim.comm.mpi.native import NativeCall, NativeEngine
from zerosim.comm.mpi.rounds import Key, Letter, RemoteRound
from zerosim.comm.mpi.session import MpiSession
from zerosim.comm.mpi.staging import Staging
from zerosim.comm.scheduler import Scheduler
from zerosim.comm.transport import meet
from zerosim.device.device import Device
from zerosim.dtypes import dtype as get_dtype
from zerosim.errors import Deadlock, RankFailed, ZerosimError, described

REMEMBERED = 256
"""Calls kept after their rounds, to name what a late letter does not fit."""


class Queues:
    """The rounds of this process that others have a part in. `devices` by rank, this process's own.

    `sent_bytes[rank]`: payload that the rank has sent to other processes, without letters.
    """

    def __init__(
        self, session: MpiSession, scheduler: Scheduler, devices: Mapping[int, Device], staging: Staging
    ) -> None:
        backend = next(iter(devices.values())).backend
        self.native = NativeEngine(session.wire, backend)
        self.open: dict[Key, RemoteRound] = {}  # changed in the scheduler's mutex, for ranks look at it too
        self.sent_bytes = dict.fromkeys(devices, 0)
        self.num_told = self.num_heard = 0
        self._session = session
        self._wire = session.wire
        self._scheduler = scheduler
        self._devices = devices
        self._staging = staging
        self._queues: dict[tuple[bool, tuple[int, ...]], deque[RemoteRound]] = {}  # the first of each is under way
        self._early: dict[Key, list[tuple[int, Letter]]] = {}
        self._calls: dict[Key, Caller] = {}  # of rounds that are over

    def add(self, round: RemoteRound) -> None:
        """All members here have joined it; `open` has it."""
        queue = self._queues.setdefault(round.key[:2], deque())
        queue.append(round)
        if len(queue) == 1:
            self._start(round)

    def read(self, process: int, letter: Letter) -> None:
        """A letter: for a round under way here, for one to come, or of a call that does not fit."""
        self.num_heard += 1
        round = self.open.get(letter.key)
        if letter.key in self._calls:
            self._clash(letter, self._calls[letter.key])
        elif round is not None and self.head_of(round) is round:
            self._take(round, process, letter)
        else:
            self._early.setdefault(letter.key, []).append((process, letter))
            if round is not None and round.call != letter.call:
                self._clash(letter, _caller(round))

    def advance(self) -> bool:
        """Finish the rounds whose messages have all come and gone, and start those behind them; whether any did."""
        happened = False
        for key, queue in list(self._queues.items()):
            while queue and not self._scheduler.switch.thrown and self._is_over(queue[0]):
                self._finish(queue[0])
                queue.popleft()
                happened = True
                if queue:
                    self._start(queue[0])
            if not queue:
                del self._queues[key]
        return happened

    def is_moving(self) -> bool:
        """Large parts are on their way. Only the first round of a group can be under way."""
        return any(queue[0].is_moving for queue in self._queues.values() if queue)

    def unanswered(self) -> Deadlock | None:
        """What is wrong where a rank elsewhere called something that ranks here have never joined."""
        for letters in self._early.values():
            for _, letter in letters:
                _, group, sequence, _ = letter.key
                caller = Caller(letter.rank, letter.call, letter.where)
                return complaints.unanswered(caller, group, sequence, [rank for rank in group if rank in self._devices])
        return None

    def head_of(self, round: RemoteRound) -> RemoteRound:
        """The round that this one waits for: the first of its group, itself perhaps."""
        queue = self._queues.get(round.key[:2])
        return queue[0] if queue else round

    def need(self, process: int) -> bool:
        """A round under way awaits something of this process."""
        return any(queue[0].needs(process) for queue in self._queues.values() if queue)

    def _start(self, round: RemoteRound) -> None:
        for process, letter in round.open(self._wire, self._staging, self.sent_bytes):
            self._session.tell(process, "letter", letter)
            self.num_told += 1
        for process, letter in self._early.pop(round.key, ()):
            self._take(round, process, letter)

    def _take(self, round: RemoteRound, process: int, letter: Letter) -> None:
        if letter.call == round.call:
            round.take(self._wire, self._staging, process, letter)
        else:
            self._clash(letter, _caller(round))

    def _clash(self, letter: Letter, here: Caller) -> None:
        """Of the two that called differently the lower one is named as the first, on whichever process this is."""
        first, second = sorted([here, Caller(letter.rank, letter.call, letter.where)], key=lambda caller: caller.rank)
        self._scheduler.abort(complaints.mismatch(second, first, letter.key[1], letter.key[2]))

    def _is_over(self, round: RemoteRound) -> bool:
        if not round.is_complete(self._wire):
            return False
        hop = round.hops[round.local[0]]
        if hop is None or hop.native is None:
            return True
        try:
            if round.native is None:
                round.native = NativeCall(self.native, round.group, hop.native, get_dtype(round.call.dtype))
            return round.native.is_done()
        except Exception as error:
            self._scheduler.abort(_explained(round, round.local[0], error))
            return False

    def _finish(self, round: RemoteRound) -> None:
        """Run the moves of this process's members, and wake who waits: nothing here holds their arrays any more."""
        if not self._moved(round):
            return
        self._calls[round.key] = _caller(round)
        if len(self._calls) > REMEMBERED:
            del self._calls[next(iter(self._calls))]
        round.hops = []
        round.inbox.clear()
        with self._scheduler.mutex:
            del self.open[round.key]
            round.done = True
            self._scheduler.wake(sorted(round.sleepers))

    def _moved(self, round: RemoteRound) -> bool:
        """Run the moves, in rank order. False: one failed, and the run ends."""
        lanes = [
            lane for lane in (self._devices[round.group[member]].lane for member in round.local) if lane is not None
        ]
        round.land(self._staging)
        if lanes:
            meet(lanes, round.fences)
        for index, member in enumerate(round.local):
            hop = round.hops[member]
            if hop is None or hop.move is None:
                continue
            try:
                with lanes[index].use() if lanes else nullcontext():
                    hop.move(partial(round.posted_for, member))
            except Exception as error:
                self._scheduler.abort(_explained(round, member, error))
                return False
        if lanes:
            meet(lanes, [lane.fence() for lane in lanes])
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
