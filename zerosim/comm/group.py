"""A rank's side of a group: works in flight, and the record of each call.

Each call records one Launch with its bytes, its Messages, and the Kernel of the sums that this rank owns; later a Wait.
The caller's thread records them when it launches (or waits), whichever thread runs the moves, so a rank's record does
not depend on how ranks take turns. A collective's own copies are not kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from types import MappingProxyType
from typing import Generic, ParamSpec, TypeVar

from zerosim.backends.kernels import Array
from zerosim.comm import checks
from zerosim.comm.algorithms import direct, native, pairs, ring
from zerosim.comm.algorithms.execution import Algorithm, Execution, Member
from zerosim.comm.transports.rounds import Call, Key, Round, Transport
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.events import Copy, Launch, Message, Wait
from zerosim.device.work import VECTOR, KernelWork
from zerosim.dtypes import DType
from zerosim.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")
Buffers = TypeVar("Buffers", Buffer, list[Buffer])

ALGORITHMS = ("direct", "ring", "pairs", "native")
_RULES: Mapping[str, Algorithm] = MappingProxyType({"direct": direct, "ring": ring, "pairs": pairs, "native": native})


class Work(Generic[T]):
    """A collective in flight. Holds its buffers until its owner's thread waits for it."""

    def __init__(self, device: Device, result: T, buffers: Sequence[Buffer]) -> None:
        self._device = device
        self._result = [result]
        self._buffers = list(buffers)
        self._scratch: dict[int, Buffer] = {}
        self.launched: list[int] = []
        self.last: Round | None = None  # rounds of a group run in order: when the last one is done, all are
        self.staged: list[Round] = []  # rounds whose messages pass through the host's memory

    def wait(self) -> T:
        """Wait for the result, and return it.

        Raises: InputError at a second wait (its buffers are gone).
        """
        device, recorder = self._device, self._device.recorder
        if not self._result:
            raise InputError(f"rank {device.rank} waits twice for one collective: store the result of the first wait")
        if self.last is not None:
            self.last.wait(device.rank)
        if recorder.enabled:
            for round in self.staged:
                for copied in round.copies(device.rank):
                    recorder.add(Copy(device.where, *copied))
            for id in self.launched:
                recorder.add(Wait(device.where, id))
        self._buffers.clear()
        self._scratch.clear()
        return self._result.pop()

    def scratch(self, index: int, numel: int, dtype: DType) -> Array:
        """Return the `index`-th temporary. The first bucket is the largest; later ones share its memory."""
        buffer = self._scratch.get(index)
        if buffer is None:
            buffer = self._scratch[index] = self._device.alloc((numel,), dtype, Kind.COMM)
        return buffer.array[:numel]


def at_once(launch: Callable[P, Work[T]]) -> Callable[P, T]:
    """Make the verb NAME of the method `launch_NAME`: call it, wait, and return the result."""

    @wraps(launch)
    def verb(*args: P.args, **kwargs: P.kwargs) -> T:
        return launch(*args, **kwargs).wait()

    verb.__name__ = launch.__name__.removeprefix("launch_")
    of_launch = signature(launch)
    result = of_launch.return_annotation.removeprefix("Work[").removesuffix("]")
    vars(verb)["__signature__"] = of_launch.replace(return_annotation=result)
    return verb


class Group:
    """The members of a group, and how they launch a call. `ranks` are global and ascending."""

    def __init__(
        self,
        device: Device,
        transport: Transport,
        ranks: Sequence[int],
        axis: str = "dp_shard",
        algorithm: str = "direct",
        bucket_bytes: int | None = None,
        number: int = 0,
    ) -> None:
        self.device = device
        self.ranks = tuple(ranks)
        if list(self.ranks) != sorted(set(self.ranks)):
            raise InputError(f"rank {device.rank}: a group lists ranks in ascending order, not {self.ranks}")
        if device.rank not in self.ranks:
            raise InputError(f"rank {device.rank} is not a member of the group {self.ranks}")
        if algorithm not in ALGORITHMS:
            raise InputError(f"unknown algorithm {algorithm!r}: expected one of {', '.join(ALGORITHMS)}")
        if bucket_bytes is not None and bucket_bytes < 1:
            raise InputError(f"bucket_bytes is {bucket_bytes}: expected at least 1, or None for one call")
        self.rank = self.ranks.index(device.rank)
        self.size = len(self.ranks)
        self.axis = axis
        self.number = number
        self.algorithm = algorithm
        self.bucket_bytes = bucket_bytes
        self._transport = transport
        # A group of one always uses the direct algorithm: a ring of one has no rounds, and there are no messages to
        # count.
        self._algorithm = _RULES[algorithm] if self.size > 1 else direct
        # Keyed by ranks, not by object: equal groups are one group, however often they are made.
        self._sequences: dict[tuple[int, tuple[int, ...]], int] = {}

    def _limit(self, itemsize: int, parts: int = 1) -> int | None:
        """Return the elements per bucket and part: bucket_bytes, but at least one element per rank.

        A native call takes whole buffers: its engine cuts them itself.
        """
        if self.bucket_bytes is None or self._algorithm is native:
            return None
        return max(self.bucket_bytes // itemsize, self.size) // parts

    def _even_limit(self, itemsize: int) -> int | None:
        """Return the same as `_limit`, as a multiple of N: every rank adds equally much of each bucket but the last."""
        limit = self._limit(itemsize)
        return None if limit is None else limit - limit % self.size

    def _open(self, name: str, value: Buffer | list[Buffer], op: str = "", root: int = -1) -> tuple[list[Buffer], Call]:
        """Check a call's buffers, and return them with the arguments that all ranks must agree on."""
        buffers = checks.buffers_of(self.device, name, value)
        dtype = buffers[0].dtype
        if op:
            checks.reduction(self.device, name, op, dtype)
        return buffers, Call(name, dtype.name, tuple(buffer.shape for buffer in buffers), op, root)

    def _member(self, work: Work[T], dtype: DType) -> Member:
        return Member(
            self.rank,
            self.size,
            dtype.itemsize,
            self.device.backend,
            lambda index, numel: work.scratch(index, numel, dtype),
            self.number,
        )

    def _whole(
        self, name: str, buffer: Buffer, op: str = "", root: int = -1
    ) -> tuple[Work[Buffer], Member, Call, Array]:
        """Launch a call on one buffer, taken flat and whole."""
        _, call = self._open(name, buffer, op, root)
        work = Work(self.device, buffer, [buffer])
        return work, self._member(work, buffer.dtype), call, checks.flat(self.device, name, buffer)

    def _outputs(
        self, name: str, out: Buffer | list[Buffer] | None, shapes: Sequence[int], dtype: DType, kind: Kind
    ) -> list[Buffer]:
        """Return a collective's outputs: the buffers given, checked, or new ones."""
        if out is None:
            return [self.device.alloc((numel,), dtype, kind) for numel in shapes]
        outs = checks.buffers_of(self.device, name, out)
        checks.outputs(self.device, name, outs, dtype, shapes)
        return outs

    def _launch(self, work: Work[T], call: Call, execution: Execution, payload_bytes: int, purpose: str) -> None:
        """Launch one call of the whole group."""
        self._join(work, call, call.op, self.ranks, execution, payload_bytes, purpose)

    def next_number(self, group: tuple[int, ...], pair: int = 0, calls: int = 1) -> int:
        """Return the next call's number, the first of `calls`; all members count their calls alike."""
        number = self._sequences.get((pair, group), 0)
        self._sequences[pair, group] = number + calls
        return number

    def _join(
        self,
        work: Work[T],
        call: Call,
        op: str,
        group: tuple[int, ...],
        execution: Execution,
        payload_bytes: int,
        purpose: str,
    ) -> None:
        """Record one call and join its rounds, all of them at once."""
        device, recorder = self.device, self.device.recorder
        sequence = self.next_number(group, call.pair)
        id = device.next_id()
        if recorder.enabled:
            sent, received = execution.sent_bytes, execution.received_bytes
            recorder.add(
                Launch(
                    device.where,
                    id,
                    op,
                    call.dtype,
                    purpose,
                    self.axis,
                    group,
                    sequence,
                    payload_bytes,
                    sent,
                    received,
                    execution.modelled_bytes,
                    self.algorithm,
                )
            )
            for peer, nbytes, count in execution.messages:
                recorder.add(Message(device.where, id, peer if peer < 0 else self.ranks[peer], nbytes, count))
        if execution.flops:
            device.count(
                KernelWork("reduce", VECTOR, execution.flops, execution.bytes_read, execution.bytes_written), id
            )
        for number, exchange in enumerate(execution.rounds):
            work.last = self._transport.join(device.rank, Key(call.pair, group, sequence, number), call, exchange)
            if self._transport.is_staged:
                work.staged.append(work.last)
        work.launched.append(id)
