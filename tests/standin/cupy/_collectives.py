"""What NCCL's communicators do with one another: ranks gather, and a collective runs when the last one calls it.

It runs in rank order and in the type's wide form, rounded once (real NCCL's order of additions differs). Every rank's
stream is ordered after every rank's earlier work, and goes on when all have been read.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from cupy._clock import StreamClock, join, launch
from cupy._segments import touch
from cupy._state import LOCK, THREAD, StandinError

NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = 6, 7, 8, 9
NCCL_HALF, NCCL_FLOAT, NCCL_DOUBLE, NCCL_CHAR, NCCL_INT = 6, 7, 8, 0, 2
_NUMPY = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
PATIENCE_S = 10.0  # a rank that waits longer for the others in NCCL is said to hang
DTYPES = {k: np.dtype(name) for k, name in enumerate(_NUMPY)} | {NCCL_BFLOAT16: np.dtype(ml_dtypes.bfloat16)}


class NcclError(RuntimeError):
    pass


@dataclass(slots=True)
class Call:
    """What one rank asked for; `what` must be the same on every rank."""

    rank: int
    what: tuple[Any, ...]
    send: int
    recv: int
    stream: StreamClock
    device: int
    done: bool = False


@dataclass(slots=True)
class World:
    """The ranks of one unique id, and the collectives that wait for some of them."""

    size: int
    joined: dict[int, int] = field(default_factory=dict)
    queues: dict[int, list[Call]] = field(default_factory=dict)
    messages: dict[tuple[int, int], list[Call]] = field(default_factory=dict)  # sends, or receives, without the other
    error: str = ""
    ready: threading.Condition = field(default_factory=lambda: threading.Condition(LOCK))


def enter(communicator: Any) -> None:
    world = communicator._world
    with LOCK:
        if communicator._rank in world.joined:
            raise NcclError(f"NCCL_ERROR_INVALID_ARGUMENT: rank {communicator._rank} joined twice")
        if communicator._device in world.joined.values():
            raise NcclError(
                f"NCCL_ERROR_INVALID_USAGE: Duplicate GPU detected: device {communicator._device}, two ranks"
            )
        world.joined[communicator._rank] = communicator._device
        world.ready.notify_all()


def await_members(communicator: Any) -> None:
    world = communicator._world
    with LOCK:
        if not world.ready.wait_for(lambda: len(world.joined) == world.size, PATIENCE_S):
            raise StandinError(f"NcclCommunicator: {len(world.joined)} of {world.size} ranks came: NCCL would hang")


def await_(world: World, call: Call) -> None:
    """Real NCCL returns before the others came; here the work runs at once, so the host has to wait for them."""
    with LOCK:
        if not world.ready.wait_for(lambda: call.done or bool(world.error), PATIENCE_S):
            world.error = (
                f"rank {call.rank} of {world.size} waits alone in {call.what[0]}: NCCL hangs (does one thread call for "
                "several communicators outside groupStart and groupEnd?)"
            )
            world.ready.notify_all()
        if not call.done:
            raise StandinError(world.error)


def arrive(world: World, call: Call) -> None:
    """Queue a rank's call; run the collectives that every rank has reached."""
    with LOCK:
        if world.error:
            raise NcclError(world.error)
        if call.what[0] in ("send", "recv"):
            _pair(world, call)
            return
        world.queues.setdefault(call.rank, []).append(call)
        while len(world.queues) == world.size and all(world.queues.values()):
            calls = [world.queues[rank].pop(0) for rank in range(world.size)]
            for other in calls:
                if other.what != calls[0].what:
                    world.error = f"rank 0 calls {calls[0].what} and rank {other.rank} calls {other.what}: NCCL hangs"
                    world.ready.notify_all()
                    raise StandinError(world.error)
            _run(calls)
            for done in calls:
                done.done = True
            world.ready.notify_all()


def _pair(world: World, call: Call) -> None:
    """A message runs when both of its ends are there, in the order of each end's calls."""
    name, count, datatype, _, peer = call.what
    waiting = world.messages.setdefault((call.rank, peer) if name == "send" else (peer, call.rank), [])
    if not waiting or waiting[0].what[0] == name:
        waiting.append(call)
        return
    ends = {end.what[0]: end for end in (waiting.pop(0), call)}
    if ends["send"].what[1:3] != ends["recv"].what[1:3]:
        world.error = f"{ends['send'].what} meets {ends['recv'].what}: NCCL hangs or writes past the end"
        world.ready.notify_all()
        raise StandinError(world.error)
    before, streams, memory = THREAD.device, [end.stream.seen for end in ends.values()], {}
    try:
        join(*streams)  # neither end's stream begins before both are there
        join(*streams[::-1])
        for side, end in ends.items():
            THREAD.device = end.device
            work = launch(end.stream, f"nccl {side}")
            memory[side] = _view(work, end.send or end.recv, count, DTYPES[datatype], side == "recv")
        memory["recv"][...] = memory["send"]
        join(*streams)  # or goes on before all is copied
        join(*streams[::-1])
    finally:
        THREAD.device = before
    for end in ends.values():
        end.done = True
    world.ready.notify_all()


def _run(calls: list[Call]) -> None:
    name, count, datatype, op, root = calls[0].what
    dtype, size = DTYPES[datatype], len(calls)
    wide = dtype if dtype.kind in "iu" or dtype == np.float64 else np.dtype(np.float32)
    sends = {"reduceScatter": count * size}.get(name, count)
    receives = {"allGather": count * size}.get(name, count)
    before, works, inputs = THREAD.device, [], []
    try:
        everyone: dict[int, int] = {}
        for call in calls:
            join(everyone, call.stream.seen)
        for call in calls:
            join(call.stream.seen, everyone)
        for call in calls:
            THREAD.device = call.device
            works.append(launch(call.stream, f"nccl {name}"))
            if name != "broadcast" or call.rank == root:
                inputs.append(_view(works[-1], call.send, sends, dtype, False).astype(wide))
        outputs = _results(name, inputs, op, count, size)
        for call, work in zip(calls, works, strict=True):
            if name != "reduce" or call.rank == root:
                _view(work, call.recv, receives, dtype, True)[...] = outputs[call.rank].astype(dtype)
        everyone = {}
        for call in calls:
            join(everyone, call.stream.seen)
        for call in calls:  # no rank's stream passes before every rank has been read
            join(call.stream.seen, everyone)
    finally:
        THREAD.device = before


def _results(name: str, inputs: list[np.ndarray], op: int, count: int, size: int) -> list[np.ndarray]:
    if name == "broadcast":
        return inputs * size
    if name == "allGather":
        return [np.concatenate(inputs)] * size
    total = inputs[0].copy()
    for part in inputs[1:]:
        total = {NCCL_PROD: np.multiply, NCCL_MAX: np.maximum, NCCL_MIN: np.minimum}.get(op, np.add)(total, part)
    if op == NCCL_AVG:
        total = total / total.dtype.type(size)
    return np.split(total, size) if name == "reduceScatter" else [total] * size


def _view(work: Any, ptr: int, count: int, dtype: np.dtype, writes: bool) -> np.ndarray:
    memory = touch(work, ptr, (count,), (dtype.itemsize,), dtype.itemsize, writes)
    return np.empty(0, dtype) if memory is None else memory.view(dtype)
