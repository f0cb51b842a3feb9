"""Programs for `launch`, run by tests on threads and, as a script under mpirun, on processes.

    mpirun -n 2 python programs.py NAME RANKS_PER_PROCESS SETTINGS RESULTS

Process 0 writes what every rank returned to RESULTS; an error is told as the command line tells it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from zerosim.backends.kernels import Native
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.backends.numpy.ops import array_over
from zerosim.comm.algorithms.execution import Execution
from zerosim.comm.group import Work
from zerosim.comm.runtime import Context, World, launch
from zerosim.comm.transports.mpi import session as mpi_session_module
from zerosim.comm.transports.mpi.session import mpi_session
from zerosim.comm.transports.rounds import Call, Exchange
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType, dtype
from zerosim.errors import ZerosimError

LARGE = 30_011
"""Elements: a chunk of any dtype for 4 ranks is larger than what travels within a note."""


def filled(ctx: Context, numel: int, fmt: str, salt: int = 0) -> Buffer:
    """Numbers that differ on every rank."""
    buffer = ctx.device.alloc((numel,), dtype(fmt), Kind.GRAD)
    random = np.random.default_rng([ctx.rank, numel, salt])
    ctx.device.backend.from_host(random.standard_normal(numel).astype(np.float32), buffer.array)
    return buffer


def values(buffer: Buffer) -> bytes:
    return bytes(buffer.array.tobytes())


def record(ctx: Context) -> list[Any]:
    ctx.device.recorder.drain()
    return list(ctx.device.recorder.history)


def sent_bytes(ctx: Context) -> int | None:
    """Payload that this rank really sent to other processes; None on threads."""
    sent = getattr(ctx.comm._transport, "sent_bytes", None)
    return None if sent is None else sent[ctx.rank]


def collectives(ctx: Context) -> tuple[dict[str, bytes], list[Any], int | None]:
    """Every verb, small and large, in three formats, on the world, on a subgroup and between pairs."""
    found: dict[str, bytes] = {}
    size, rank = ctx.world_size, ctx.rank
    half = ctx.comm.subgroup([r for r in range(size) if r % 2 == rank % 2])
    for fmt in ("fp32", "bf16", "fp16"):
        for numel in (5, 0, LARGE):
            for name, comm in (("world", ctx.comm), ("half", half)):
                at = f"{name} {fmt} {numel}"
                for op in ("avg", "sum", "max"):
                    found[f"all_reduce {op} {at}"] = values(comm.all_reduce(filled(ctx, numel, fmt), op))
                full = filled(ctx, numel * comm.size, fmt)
                found[f"reduce_scatter {at}"] = values(comm.reduce_scatter(full))
                found[f"all_gather {at}"] = values(comm.all_gather(filled(ctx, numel, fmt)))
                found[f"all_to_all {at}"] = values(comm.all_to_all(full))
                sent = [numel * ((comm.rank + 2 * other) % 3) for other in range(comm.size)]  # a third are empty
                received = [numel * ((other + 2 * comm.rank) % 3) for other in range(comm.size)]
                uneven = comm.all_to_all(
                    filled(ctx, sum(sent), fmt), input_split_sizes=sent, output_split_sizes=received
                )
                found[f"all_to_all uneven {at}"] = values(uneven)
                root = comm.size - 1
                found[f"broadcast {at}"] = values(comm.broadcast(filled(ctx, numel, fmt), root))
                found[f"reduce {at}"] = values(comm.reduce(filled(ctx, numel, fmt), 0))
                comm.barrier()
            if size > 1:
                to, source = (rank + 1) % size, (rank - 1) % size
                sending = ctx.comm.launch_send(filled(ctx, numel, fmt), to)
                found[f"recv {fmt} {numel}"] = values(ctx.comm.recv((numel,), dtype(fmt), source))
                sending.wait()
    several = [filled(ctx, numel, "bf16") for numel in (3, LARGE, 40)]
    found["several"] = b"".join(values(b) for b in ctx.comm.all_reduce(several))
    return found, record(ctx), sent_bytes(ctx)


def out_of_order(ctx: Context) -> tuple[list[bytes], list[Any], int | None]:
    """Many works under way at once on two groups, waited for from the last to the first."""
    half = ctx.comm.subgroup([r for r in range(ctx.world_size) if r % 2 == ctx.rank % 2])
    works = []
    for salt in range(12):
        comm = half if salt % 3 == 0 else ctx.comm
        numel = LARGE if salt % 2 else 7
        works.append(comm.launch_all_reduce(filled(ctx, numel, "bf16", salt)))
        works.append(comm.launch_all_gather(filled(ctx, numel, "bf16", salt)))
    return [values(work.wait()) for work in reversed(works)], record(ctx), sent_bytes(ctx)


def large(ctx: Context, numel: int = 0) -> list[int]:
    """One message of more bytes than 31 bits count: what came, at its two ends and in the middle."""
    if ctx.rank == 0:
        buffer = ctx.device.alloc((numel,), dtype("uint8"), Kind.PARAM)
        buffer.array[:] = 3
        buffer.array[-1] = 7
        ctx.comm.send(buffer, 1)
        return []
    got = ctx.comm.recv((numel,), dtype("uint8"), 0).array
    return [int(got[0]), int(got[numel // 2]), int(got[-1]), int(got.sum(dtype=np.int64))]


def freed(ctx: Context) -> list[bool]:
    """Whether what a rank lets go of after a collective is gone at once, though those who woke it are slow to go on."""
    scheduler = ctx.comm._transport.scheduler  # type: ignore[attr-defined]
    wake = scheduler.wake

    def wake_and_dawdle(ranks: list[int]) -> None:
        wake(ranks)
        scheduler.mutex.release()
        time.sleep(0.1)
        scheduler.mutex.acquire()

    scheduler.wake = wake_and_dawdle
    found = []
    for numel in (3, LARGE):
        work = ctx.comm.launch_all_reduce(filled(ctx, numel, "fp32"))
        array = weakref.ref(work._result[0].array)
        work.wait()
        found.append(array() is None)
    return found


def failing(ctx: Context, how: str = "") -> None:
    """Something goes wrong on the last rank, or between ranks, after one good collective."""
    last, comm = ctx.rank == ctx.world_size - 1, ctx.comm
    gradient = filled(ctx, 1000, "fp32")
    comm.all_reduce(gradient)
    if last and how == "mismatch":
        gradient = filled(ctx, 8, "fp32")
    elif last and how == "exception":
        raise ValueError("the program's own mistake")
    elif last and how == "memory":
        ctx.device.alloc((10**9,), dtype("fp32"), Kind.GRAD)
    elif last and how == "returns":
        return
    elif last and how == "sleeps":
        time.sleep(30)
    elif last and how == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif last and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "circle":
        comm.recv((4,), dtype("fp32"), (ctx.rank + 1) % ctx.world_size)
    elif how == "roots":
        comm.broadcast(gradient, ctx.rank)
    elif how == "sizes":
        comm.all_to_all(gradient[:6], input_split_sizes=[2, 2, 2], output_split_sizes=[2 + last, 2, 2])
    elif how == "unknown":
        native = Execution([Exchange(native=Native("scan", [gradient.array], [gradient.array]))], [], 0)
        comm._launch(Work(ctx.device, None, []), Call("scan", "fp32", ((1000,),)), native, 0, "states")
    elif how == "forever":
        print(f"process {os.getpid()}", flush=True)
        time.sleep(30)
    comm.all_reduce(gradient)


PROGRAM = {"collectives": collectives, "out_of_order": out_of_order, "large": large, "freed": freed, "failing": failing}


def program(name: str, **settings: Any) -> Any:
    """A program by name; its own settings taken out of `settings`."""
    return lambda ctx: PROGRAM[name](ctx, **settings)


class HostStream:
    """The stream of a device whose memory MPI must not touch: every byte goes through `download` and `upload`."""

    def use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record_event(self) -> None:
        return None

    def wait_event(self, event: None) -> None:
        return None

    def download(self, array: Any) -> Any:
        return array.reshape(-1).view(np.uint8).copy()

    def upload(self, data: Any, shape: tuple[int, ...], fmt: DType) -> Any:
        return array_over(bytes(data), fmt).reshape(shape)


def main(name: str, per_process: str, asked: str, left: str) -> int:
    settings = pickle.loads(Path(asked).read_bytes())
    world, own = settings.get("world", {}), settings.get("own", {})
    if settings.get("staged"):
        NumpyBackend.open_stream = lambda self, rank: HostStream()  # type: ignore[method-assign, assignment, return-value]
    mpi_session_module.ANSWER_S = settings.get("answer_s", mpi_session_module.ANSWER_S)
    session = mpi_session()
    ranks = session.processes * int(per_process)
    try:
        mine = launch(program(name, **own), World(ranks=ranks, transport="mpi", per_process=int(per_process), **world))
        found = session.exchange(mine)
    except ZerosimError as error:
        if session.process == 0:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    if session.process == 0:
        Path(left).write_bytes(pickle.dumps([result for results in found for result in results]))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
