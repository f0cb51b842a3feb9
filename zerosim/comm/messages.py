"""Messages between two members of a group: send and recv, waited for at once or later."""

from __future__ import annotations

from zerosim.comm import checks
from zerosim.comm.algorithms.execution import Execution
from zerosim.comm.group import Group, T, Work, at_once
from zerosim.comm.transports.rounds import Call, Exchange
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType
from zerosim.errors import InputError

SENDER, RECEIVER = 0, 1
"""Members of a message's pair."""


class Messages(Group):
    """One rank's membership in a group, with the verbs between two members. `src` and `dst` are indices in the
    group."""

    def launch_send(
        self, buffer: Buffer, dst: int, purpose: str = "states", *, tag: int = 0, name: str = ""
    ) -> Work[None]:
        """Send to member `dst`; complete when it has received. Messages of one pair and `tag` keep their order. If the
        two ends give different names, that is a mismatch."""
        checks.member(self.device, "send", "dst", dst, self.size)
        checks.buffers_of(self.device, "send", buffer)
        work: Work[None] = Work(self.device, None, [buffer])
        execution = Execution([Exchange((buffer.array,), to=(RECEIVER,))], [(dst, buffer.nbytes, 1)], 0)
        self._launch_pair(work, "send", self.rank, dst, buffer, execution, purpose, tag, name)
        return work

    send = at_once(launch_send)

    def launch_recv(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        src: int,
        kind: Kind = Kind.ACTIVATION,
        purpose: str = "states",
        *,
        tag: int = 0,
        name: str = "",
    ) -> Work[Buffer]:
        """Receive member `src`'s message under `tag` in a new buffer of `kind`; its shape, dtype and name must
        match."""
        checks.member(self.device, "recv", "src", src, self.size)
        buffer = self.device.alloc(shape, dtype, kind)
        out, copy = buffer.array, self.device.backend.copy
        work = Work(self.device, buffer, [])
        exchange = Exchange(sources=(SENDER,), move=lambda inbox: copy(inbox(SENDER)[0], out))
        execution = Execution([exchange], [], buffer.nbytes)
        self._launch_pair(work, "recv", src, self.rank, buffer, execution, purpose, tag, name)
        return work

    recv = at_once(launch_recv)

    def _launch_pair(
        self,
        work: Work[T],
        op: str,
        src: int,
        dst: int,
        buffer: Buffer,
        execution: Execution,
        purpose: str,
        tag: int,
        name: str,
    ) -> None:
        """Launch one side of a message between two members. Each ordered pair and tag has its own count."""
        if src == dst:
            raise InputError(f"rank {self.device.rank}: {op} to or from itself: name another rank of the group")
        call = Call("send/recv", buffer.dtype.name, (buffer.shape,), name, pair=1 + tag)
        self._join(work, call, op, (self.ranks[src], self.ranks[dst]), execution, buffer.nbytes, purpose)
