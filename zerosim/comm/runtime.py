"""Run one plain program on every rank of a world: threads, their results, and how a run ends.

    def program(ctx):
        return ctx.comm.all_reduce(...)

    results = launch(program, World(ranks=4))

Turns: `scheduler.py`. How ranks meet: `threads.py`, `mpi/`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Generic, TypeVar, cast

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from zerosim.backends.kernels import Backend
from zerosim.comm.collectives import Comm
from zerosim.comm.group import ALGORITHMS
from zerosim.comm.rank_status import scope_text
from zerosim.comm.scheduler import Scheduler
from zerosim.comm.transports.fake import FakeTransport
from zerosim.comm.transports.rounds import Transport
from zerosim.comm.transports.threads import ThreadTransport
from zerosim.device.allocators.choose import make_allocator
from zerosim.device.device import Device, Switch
from zerosim.device.interrupts import no_interrupt_lost
from zerosim.device.memory import Allocator
from zerosim.device.node import NodePool, Share, pools_of
from zerosim.device.nvme import Files
from zerosim.device.recorder import Reader, Recorder
from zerosim.errors import Aborted, InputError, RankFailed, ZerosimError, described
from zerosim.placement.memories import NVME

T = TypeVar("T")
Readers = Callable[[int], tuple[Reader, ...]]

BACKENDS = {
    "cuda": ("zerosim.backends.cuda.backend", "CudaBackend"),
    "cuda-batched": ("zerosim.backends.cuda.backend", "BatchedCudaBackend"),
    "cuda-batched-graphs": ("zerosim.backends.cuda.graphs", "BatchedGraphsBackend"),
    "cuda-graphs": ("zerosim.backends.cuda.graphs", "GraphsBackend"),
    "meta": ("zerosim.backends.meta", "MetaBackend"),
    "numpy": ("zerosim.backends.numpy.backend", "NumpyBackend"),
}
"""Class names; each is in `backends/`, imported on first use."""

TRANSPORTS = ("threads", "mpi")

GRACE_S = 0.8
"""How long the ranks of a failed run may take to end; a rank that does not react is left behind."""

MANY_RANKS = 32
STACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class World:
    """How many ranks, and how they run.

    ranks          how many
    max_running    how many run side by side; 1: they take turns, always in the same order
    backend        the array library: 'numpy', 'cuda' (CuPy), with '-batched' (--batched-flash) and '-graphs'
                   (--capture-graphs) behind it, 'meta' (shapes only)
    transport      'threads', or 'mpi': ranks in several processes that mpirun started
    per_process    of transport mpi: ranks in each process, as threads; ranks = processes x per_process
    algorithm      'direct', 'ring', 'pairs' or 'native': a file each in `comm/algorithms/`
    bucket_bytes   the most a collective moves per call, None for no limit
    capacity       bytes of memory per device, None for no limit
    allocator      hands out these bytes, with the knobs `allocator_conf`: `device/allocators/`
    node_ranks     how many neighbours share a node, None for all
    others         bytes of a node's host memory and drives, None for no limit; over mpi each rank has an equal part
    folder         the folder of the files that stand for NVMe; None on shapes
    timeout_s      seconds without any progress after which a rank that others wait for is late
    record         keep events for readers
    keep_events    keep every event in `device.recorder.history`
    """

    ranks: int
    max_running: int = 1
    backend: str = "numpy"
    transport: str = "threads"
    per_process: int = 1
    algorithm: str = "direct"
    bucket_bytes: int | None = None
    capacity: int | None = None
    allocator: str = "exact"
    allocator_conf: str | None = None
    node_ranks: int | None = None
    others: Mapping[str, int | None] = field(default_factory=dict)
    folder: Path | None = None
    timeout_s: float = 30.0
    record: bool = True
    keep_events: bool = False

    def __post_init__(self) -> None:
        _at_least_one("ranks", self.ranks)
        _at_least_one("max_running", self.max_running)
        _at_least_one("per_process", self.per_process)
        for name in ("bucket_bytes", "capacity"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        _one_of("backend", self.backend, tuple(BACKENDS))
        _one_of("transport", self.transport, TRANSPORTS)
        _one_of("algorithm", self.algorithm, ALGORITHMS)
        if not self.timeout_s > 0:
            raise InputError(f"timeout_s is {self.timeout_s}: expected more than 0 seconds")
        make_allocator(self.allocator, self.capacity, self.allocator_conf)  # refuses impossible options


def _at_least_one(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is {value!r}: expected a whole number, at least 1")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"{name} is {value!r}: expected one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class Context:
    """A program's inputs: its rank, its device, and its place in the world's group."""

    rank: int
    world_size: int
    device: Device
    comm: Comm


def launch(
    program: Callable[[Context], T],
    world: World,
    readers: Readers | None = None,
) -> list[T]:
    """Run `program` once per rank, and return the results in rank order. `readers(rank)` get that rank's events.

    In a world of transport mpi every process calls this, and gets the results of its own ranks.

    Raises: the first failure of any rank, on every process: a ZerosimError as it is, any other exception as the cause
    of a RankFailed. KeyboardInterrupt ends all ranks. InputError if the processes are not the world's.
    """

    def make_device(rank: int, backend: Backend, switch: Switch) -> Device:
        own = other_memories(world, rank, pools[rank])
        return device_of(world, rank, backend, switch, readers(rank) if readers else (), own)

    pools = node_pools(world)

    # BLAS threads times rank threads would collapse
    with no_interrupt_lost(), threadpool_limits(limits=1, user_api="blas"):
        return assemble(program, world, make_device).results(world.timeout_s)


def launch_alone(program: Callable[[Context], T], world: World, rank: int, readers: tuple[Reader, ...] = ()) -> T:
    """Run `program` as one rank of a shape-only world, on the caller's thread.

    No other rank runs: a round without data needs no peers (`comm/transports/fake.py`).

    Raises: the program's exceptions, as `launch` does.
    """
    device = device_of(world, rank, make_backend("meta"), Switch(), readers)
    context = _context(world, device, FakeTransport())
    with no_interrupt_lost(device.switch.abort):
        try:
            return program(context)
        except Exception as error:
            raise _explained(context, error) from error.__cause__
        finally:
            device.recorder.drain()


def assemble(
    program: Callable[[Context], T],
    world: World,
    make_device: Callable[[int, Backend, Switch], Device],
    scheduler: Scheduler | None = None,
) -> Ranks[T]:
    """Return this process's ranks of a world, ready to start: devices, transport, contexts, threads.

    `scheduler` replaces the default order of turns (`comm/stepping.py`).
    """
    mine, session = range(world.ranks), None
    if world.transport == "mpi":
        from zerosim.comm.transports.mpi.session import mpi_session

        session = mpi_session()
        session.check_world(world.ranks, world.per_process)
        _check_mpi(world)
        mine = range(session.process * world.per_process, (session.process + 1) * world.per_process)
    backend, switch = make_backend(world.backend), scheduler.switch if scheduler else Switch()
    devices = [make_device(rank, backend, switch) for rank in mine]
    if session is None:
        transport = ThreadTransport(devices, world.max_running, scheduler)
    else:
        from zerosim.comm.transports.mpi.transport import MpiTransport

        transport = MpiTransport(session, world.ranks, devices, world.max_running)
    return Ranks(program, transport, [_context(world, device, transport) for device in devices])


def device_of(
    world: World,
    rank: int,
    backend: Backend,
    switch: Switch,
    readers: tuple[Reader, ...] = (),
    others: Mapping[str, Allocator] | None = None,
) -> Device:
    """Return a rank's device, with its limits in its node's other memories."""
    return Device(
        rank,
        backend,
        allocator=make_allocator(world.allocator, world.capacity, world.allocator_conf),
        others=others,
        recorder=Recorder(readers, keep=world.keep_events, enabled=world.record),
        switch=switch,
        stream=backend.open_stream(rank),
    )


def node_pools(world: World) -> list[dict[str, NodePool]]:
    """Return for each rank its node's memories, which ranks of one process share."""
    shared = world.transport != "mpi"
    return pools_of(world.ranks, world.node_ranks or world.ranks, world.others, shared=shared)


def other_memories(world: World, rank: int, pools: Mapping[str, NodePool]) -> dict[str, Allocator]:
    """Return the functions by which a rank takes bytes of its node's memories."""
    found: dict[str, Allocator] = {name: Share(pool, rank) for name, pool in pools.items()}
    if world.folder is not None:
        found[NVME] = Files(world.folder, rank, pools[NVME])
    return found


def _context(world: World, device: Device, transport: Transport) -> Context:
    """Return a rank's context; all ranks share one group."""
    group = tuple(range(world.ranks))
    comm = Comm(device, transport, group, algorithm=world.algorithm, bucket_bytes=world.bucket_bytes)
    return Context(device.rank, world.ranks, device, comm)


def make_backend(name: str) -> Backend:
    """Return the backend of that name; imports its library."""
    _one_of("backend", name, tuple(BACKENDS))
    module, kind = BACKENDS[name]
    return cast(Backend, getattr(import_module(module), kind)())


def _check_mpi(world: World) -> None:
    if world.backend == "meta":
        raise InputError("backend meta on --world mpi: shapes exchange nothing; use zerosim plan, or backend numpy")
    if world.algorithm == "native" and world.per_process > 1:
        raise InputError(
            f"collective native with {world.per_process} ranks per process: MPI's collectives work between "
            "processes; start one process per rank, or choose direct or ring"
        )
    if world.algorithm == "native" and world.backend != "numpy":
        raise InputError(
            f"collective native with backend {world.backend} on --world mpi: MPI adds on the host; choose direct "
            "or ring, or --world threads for NCCL's own collectives"
        )


class Ranks(Generic[T]):
    """One program on every rank, a thread each, from start to end."""

    def __init__(self, program: Callable[[Context], T], transport: ThreadTransport, contexts: list[Context]) -> None:
        self._program = program
        self.transport = transport
        self.devices = [context.device for context in contexts]
        self._scheduler = transport.scheduler
        self.outcomes: list[T | None] = [None] * len(contexts)
        # Daemons: a rank that is stuck in its own code must not keep the process alive.
        self._threads = [
            threading.Thread(target=self._rank, args=(index, context), name=f"rank {context.rank}", daemon=True)
            for index, context in enumerate(contexts)
        ]

    def results(self, timeout_s: float) -> list[T]:
        """Run to the end, on the caller's thread, which stays interruptible."""
        try:
            self.start()
            self.transport.serve(timeout_s)
        except BaseException as error:  # KeyboardInterrupt above all: no rank may outlive the launch
            try:
                self._scheduler.abort(error)
            finally:  # another interrupt may arrive meanwhile
                self._scheduler.switch.abort()
        failure = self.transport.settle()
        self.join()
        self._scheduler.failure = None
        if failure is None:
            return cast(list[T], self.outcomes)
        try:
            raise failure
        finally:
            del failure  # its traceback holds this frame

    def start(self) -> None:
        before = threading.stack_size(STACK_BYTES) if len(self._threads) > MANY_RANKS else None
        try:
            for thread in self._threads:
                thread.start()
        finally:
            if before is not None:
                threading.stack_size(before)
        self._scheduler.begin()

    def join(self) -> None:
        """Wait for every thread; in a failed run at most GRACE_S."""
        deadline = time.monotonic() + GRACE_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(None if self._scheduler.failure is None else max(0.0, deadline - time.monotonic()))

    def _rank(self, index: int, context: Context) -> None:
        """Run one rank's program, on its thread."""
        rank = context.rank
        try:
            self._scheduler.sleep(rank)
            stream = context.device.stream
            with nullcontext() if stream is None else stream.use():
                self.outcomes[index] = self._program(context)
            context.device.recorder.drain()
            self.transport.finish(rank)
        except BaseException as error:
            if not (isinstance(error, Aborted) and context.device.switch.aborted):
                self._scheduler.abort(_explained(context, error))


def _explained(context: Context, error: BaseException) -> ZerosimError:
    """Return a rank's failure as the caller gets it."""
    if isinstance(error, ZerosimError):
        return error
    where = scope_text(error.__dict__.get("zerosim_scope", context.device.where))
    failed = RankFailed(f"rank {context.rank} failed in {where}: {described(error)}", rank=context.rank)
    failed.__cause__ = error
    return failed
