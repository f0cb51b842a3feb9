"""cupy.cuda.nccl of the stand-in: communicators of one process or thread each, and grouped calls.

Source: NCCL user guide, Group Calls; cupy_backends/cuda/libs/nccl.pyx for the signatures.
"""

from __future__ import annotations

import itertools
from typing import Any

from cupy._clock import stream_of
from cupy._collectives import (
    DTYPES,
    NCCL_AVG,
    NCCL_BFLOAT16,
    NCCL_CHAR,
    NCCL_DOUBLE,
    NCCL_FLOAT,
    NCCL_FLOAT16,
    NCCL_FLOAT32,
    NCCL_FLOAT64,
    NCCL_HALF,
    NCCL_INT,
    NCCL_INT8,
    NCCL_INT32,
    NCCL_INT64,
    NCCL_MAX,
    NCCL_MIN,
    NCCL_PROD,
    NCCL_SUM,
    NCCL_UINT8,
    NCCL_UINT32,
    NCCL_UINT64,
    Call,
    NcclError,
    World,
    arrive,
    await_,
    await_members,
    enter,
)
from cupy._state import LOCK, THREAD, StandinError, absent

_ids = itertools.count(1)
_worlds: dict[tuple[int, ...], World] = {}
__all__ = [
    "NCCL_AVG", "NCCL_BFLOAT16", "NCCL_CHAR", "NCCL_DOUBLE", "NCCL_FLOAT", "NCCL_FLOAT16", "NCCL_FLOAT32",
    "NCCL_FLOAT64", "NCCL_HALF", "NCCL_INT", "NCCL_INT8", "NCCL_INT32", "NCCL_INT64", "NCCL_MAX", "NCCL_MIN",
    "NCCL_PROD", "NCCL_SUM", "NCCL_UINT8", "NCCL_UINT32", "NCCL_UINT64", "NcclCommunicator", "NcclError",
    "get_unique_id", "groupEnd", "groupStart",
]  # fmt: skip


def get_version() -> int:
    return 22700


def get_unique_id() -> tuple[int, ...]:
    number = next(_ids)
    return (*number.to_bytes(4, "little"), *([0] * 124))


def groupStart() -> None:
    if THREAD.group is not None:
        raise StandinError("groupStart inside a group: zerosim nests none")
    THREAD.group = []


def groupEnd() -> None:
    if THREAD.group is None:
        raise NcclError("NCCL_ERROR_INVALID_USAGE: groupEnd without groupStart")
    calls, THREAD.group = THREAD.group, None
    for act in calls:
        act[0](*act[1:])
    for act in calls:
        (await_members if act[0] is enter else await_)(*act[1:])


class NcclCommunicator:
    def __init__(self, ndev: int, commId: tuple[int, ...], rank: int) -> None:
        if len(commId) != 128 or not 0 <= rank < ndev:
            raise NcclError(f"NCCL_ERROR_INVALID_ARGUMENT: rank {rank} of {ndev}")
        with LOCK:
            self._world = _worlds.setdefault(tuple(commId), World(ndev))
        if self._world.size != ndev:
            raise NcclError(f"NCCL_ERROR_INVALID_ARGUMENT: {ndev} ranks here, {self._world.size} elsewhere")
        self._rank, self._device = rank, THREAD.device
        if THREAD.group is not None:
            THREAD.group.append((enter, self))
        else:
            enter(self)
            await_members(self)

    @staticmethod
    def initAll(devices: int | list[int]) -> list[NcclCommunicator]:
        numbers = list(range(devices)) if isinstance(devices, int) else devices
        before, unique = THREAD.device, get_unique_id()
        groupStart()
        made = []
        for rank, device in enumerate(numbers):
            THREAD.device = device
            made.append(NcclCommunicator(len(numbers), unique, rank))
        THREAD.device = before
        groupEnd()
        return made

    def device_id(self) -> int:
        return self._device

    def size(self) -> int:
        return self._world.size

    def abort(self) -> None:
        self._world.error = "the communicator was aborted"

    def check_async_error(self) -> None:
        if self._world.error:
            raise NcclError(self._world.error)

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self._post(("allReduce", count, datatype, op, 0), sendbuf, recvbuf, stream)

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        self._post(("reduce", count, datatype, op, root), sendbuf, recvbuf, stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        self._post(("broadcast", count, datatype, NCCL_SUM, root), sendbuff, recvbuff, stream)

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        self._post(("reduceScatter", recvcount, datatype, op, 0), sendbuf, recvbuf, stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        self._post(("allGather", count, datatype, NCCL_SUM, 0), sendbuf, recvbuf, stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._post(("send", count, datatype, NCCL_SUM, peer), sendbuf, 0, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._post(("recv", count, datatype, NCCL_SUM, peer), 0, recvbuf, stream)

    def _post(self, what: tuple[Any, ...], send: int, recv: int, stream: int) -> None:
        self.check_async_error()
        if what[2] not in DTYPES or what[3] not in range(5) or not 0 <= what[4] < self._world.size:
            raise NcclError(f"NCCL_ERROR_INVALID_ARGUMENT: {what}")
        with LOCK:
            before, THREAD.device = THREAD.device, self._device if THREAD.group is not None else THREAD.device
            clock = stream_of(stream)
            THREAD.device = before
        if clock.device != self._device:
            raise NcclError(f"NCCL_ERROR_INVALID_USAGE: a stream of device {clock.device} for device {self._device}")
        call = Call(self._rank, what, send, recv, clock, self._device)
        if THREAD.group is not None:
            THREAD.group.append((arrive, self._world, call))
        else:
            arrive(self._world, call)
            await_(self._world, call)

    def __getattr__(self, name: str) -> Any:
        raise absent("NcclCommunicator", name)


def __getattr__(name: str) -> Any:
    raise absent("cupy.cuda.nccl", name)
