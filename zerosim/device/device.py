"""A simulated device: every allocation and every kernel of a rank passes through here and is recorded.

Memory is counted at `Device.alloc` and where a buffer's storage dies; work at `Device.kernel`. Arithmetic
is done in `backends/`, totals are computed in `ledger/`. A storage owns its array, so the lifetime of the
object is the lifetime of the bytes. No reference cycle may hold one, because it must die at once. The recorder watches
for its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from typing import Any, ParamSpec
from weakref import ref

from zerosim.backends.kernels import Array, Backend, Stream
from zerosim.device.events import Alloc, Kernel, Mark, Pool, Refusal, Retag, Scope, Turn
from zerosim.device.memory import Allocator, BesidePages, Exact, Memories, MovesOut
from zerosim.device.node import CALLED, Share, out_of_node
from zerosim.device.recorder import Recorder
from zerosim.device.work import KernelWork, work_of
from zerosim.dtypes import DType
from zerosim.errors import Aborted, OutOfMemory
from zerosim.placement.memories import DEVICE
from zerosim.units import format_bytes

P = ParamSpec("P")


class Kind(StrEnum):
    """The purpose of bytes. PARAM, GRAD and OPTIM are ZeRO's model states."""

    PARAM = "param"
    GRAD = "grad"
    OPTIM = "optim"
    UNSHARDED_PARAM = "unsharded_param"
    PREFETCHED_PARAM = "prefetched_param"
    UNSHARDED_GRAD = "unsharded_grad"
    ACTIVATION = "activation"
    ACTIVATION_GRAD = "activation_grad"
    KEPT = "kept"
    TEMP = "temp"
    COMM = "comm"


class Phase(StrEnum):
    """The phase of a step in which an event happened. The curvature phases belong to an estimate, which follows some
    steps of some optimizers: a second forward and backward, on drawn labels, and the use of their gradients."""

    INIT = "init"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    CURVATURE_FORWARD = "curvature_forward"
    CURVATURE_BACKWARD = "curvature_backward"
    CURVATURE = "curvature"
    EVALUATE = "evaluate"
    SAVE = "save"


class Switch:
    """Set once, to end the run. Every rank checks it before each kernel."""

    __slots__ = ("aborted",)

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class Storage:
    """The bytes themselves: a storage owns one array in one memory, and the recorder watches for its end."""

    __slots__ = ("__weakref__", "array", "device", "id", "memory")

    def __init__(self, array: Array, device: Device, id: int, memory: str = DEVICE) -> None:
        self.array = array
        self.id = id
        self.device = device
        self.memory = memory
        recorder = device.recorder
        recorder.owners[ref(self, recorder.bury)] = id, memory  # `watch`, without the time of a call


class Buffer:
    """A handle on a storage, or on a view of it. Slices and reshapes share its bytes and cost none."""

    __slots__ = ("__weakref__", "array", "dtype", "storage")  # the stepper's view must not keep the bytes alive

    def __init__(self, storage: Storage, array: Array, dtype: DType) -> None:
        self.storage = storage
        self.array = array
        self.dtype = dtype

    @property
    def device(self) -> Device:
        return self.storage.device

    @property
    def memory(self) -> str:
        return self.storage.memory

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def numel(self) -> int:
        return int(self.array.size)

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    def __getitem__(self, window: Any) -> Buffer:
        return Buffer(self.storage, self.array[window], self.dtype)

    def reshape(self, *shape: int) -> Buffer:
        """Return the same bytes with another shape. Raises: ValueError if only a copy could have it."""
        if not self.array.flags.c_contiguous:
            raise ValueError(f"a strided window of shape {self.shape} cannot be seen as {shape} without a copy")
        return Buffer(self.storage, self.array.reshape(shape), self.dtype)

    def __repr__(self) -> str:
        return f"Buffer(shape={self.shape}, dtype={self.dtype}, id={self.storage.id})"


class _Within(AbstractContextManager[None]):
    """Records a device's events inside `with` under another scope. A class costs half of a `contextmanager`."""

    __slots__ = ("before", "device", "where")

    def __init__(self, device: Device, where: Scope) -> None:
        self.device, self.where, self.before = device, where, device.where

    def __enter__(self) -> None:
        self.device.move(self.where)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:  # a report names the innermost scope of the event
            error.__dict__.setdefault("zerosim_scope", self.device.where)
        self.device.move(self.before)


class Device:
    """One rank's device. It holds a rank's ambient state: scope, place, gradient switch."""

    def __init__(
        self,
        rank: int,
        backend: Backend,
        *,
        allocator: Allocator | None = None,
        others: Mapping[str, Allocator] | None = None,
        recorder: Recorder | None = None,
        switch: Switch | None = None,
        stream: Stream | None = None,
    ) -> None:
        self.rank = rank
        self.backend = backend
        self.stream = stream  # the queue of kernels, for a backend that queues them
        self._allocator = allocator or Exact()
        self.memories = Memories(self._allocator, others or {})
        self.recorder = recorder or Recorder()
        self.recorder.release = self.memories.release
        self.switch = switch or Switch()
        self.where = Scope()
        self.place = DEVICE  # the place of kernels, and of buffers without another memory
        self.grad_enabled = True
        self.on_save: Callable[[Iterable[object]], None] | None = None  # takes what ops save for backward
        self.pages: MovesOut | None = None  # what may leave a full device
        self.takes_turns = False
        self._last_id = 0
        self.ticks = 0  # grows with every kernel, so that a watcher can distinguish a slow rank from a stuck one

    @property
    def allocator(self) -> Allocator:
        """The device's allocator, after all dead bytes were taken back."""
        self.recorder.settle()
        return self._allocator

    def next_id(self, count: int = 1) -> int:
        """Return a number that names one buffer or one work of this rank; the first of `count`."""
        self._last_id += count
        return self._last_id - count + 1

    def alloc(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        kind: Kind,
        *,
        padding: int = 0,
        name: str = "",
        memory: str | None = None,
        paged: bool = False,
    ) -> Buffer:
        """Allocate a buffer with undefined contents. `padding` of its elements belong to no parameter; `name` is that
        of an optimizer's state; `memory` defaults to the place of kernels (`at`); `paged`: in pages of the driver.

        Raises: OutOfMemory when the memory's allocator refuses.
        """
        nbytes, memory = math.prod(shape) * dtype.itemsize, memory or self.place
        id, reserved = self.reserve(nbytes, kind, memory, paged)
        try:
            array = self.memories.empty(memory, id, shape, dtype, self.backend)
        except BaseException:  # the host's own memory ran out
            self.memories.release(id, memory)
            raise
        self.recorder.add(Alloc(self.where, id, nbytes, reserved, kind.value, padding * dtype.itemsize, name, memory))
        return Buffer(Storage(array, self, id, memory), array, dtype)

    def reserve(self, nbytes: int, kind: Kind, memory: str = DEVICE, paged: bool = False) -> tuple[int, int]:
        """Reserve room for a new buffer. Return its id, and the bytes that the allocator takes. It is not recorded yet.

        Raises: OutOfMemory when the allocator refuses, and no pages are left to move out.
        """
        id = self.next_id()
        if self.recorder.dead:
            self.recorder.settle()
        allocator = self.memories.allocators[memory]
        take = allocator.reserve_pages if paged and isinstance(allocator, BesidePages) else allocator.reserve
        while (reserved := take(id, nbytes)) is None:
            if memory != DEVICE or self.pages is None or not self.pages.move_out():
                break
        if self._allocator.changes:
            self._record_news()
        if reserved is None:
            self.recorder.add(Refusal(self.where, nbytes, kind.value, memory))
            raise self._out_of_memory(nbytes, kind, memory)
        return id, reserved

    def share(self, pages: MovesOut) -> None:
        """Let these pages move out where an allocation does not fit."""
        self.pages = pages
        if isinstance(self._allocator, BesidePages):
            self._allocator.share(pages)

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Run kernels inside `with device.at("host"):` on the host's CPU, and allocate new buffers in its memory."""
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    def retag(self, buffer: Buffer, kind: Kind) -> None:
        """Change the purpose of bytes from here on."""
        self.recorder.add(Retag(self.where, buffer.storage.id, kind.value))

    def kernel(self, flops: int, run: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run one of the backend's kernels and record it: its flops, and the bytes of its arrays."""
        self.look_up()
        if self.recorder.enabled:
            self._record(work_of(run.__name__, flops, args))
        run(*args, **kwargs)

    def kernels(
        self, parts: Sequence[KernelWork], run: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Run one kernel of the backend that stands for several of a device, and record those."""
        for part in parts:
            self.count(part)
        run(*args, **kwargs)

    def product(self, name: str, run: Callable[..., None], left: Array, right: Array, *rest: Array | None) -> None:
        """Run a product of left (M, K) and right (K, N), and record it as `name`: 'linear' or one of its backward."""
        (rows, inner), columns = left.shape, right.shape[1]
        work = work_of(run.__name__, 2 * rows * inner * columns, (left, right, *rest))
        self.kernels((work._replace(name=name, shape=(rows, inner, columns)),), run, left, right, *rest)

    def count(self, part: KernelWork, work: int | None = None) -> None:
        """Record this rank's work, whichever thread runs it (a collective's sums run on the last rank to join).

        Raises: Aborted when the run has been ended.
        """
        self.look_up()
        if self.recorder.enabled:
            self._record(part, work)

    def _record(self, part: KernelWork, work: int | None = None) -> None:
        if self.place == DEVICE:
            self.recorder.add(Kernel(self.where, *part, work))
        else:
            self.recorder.add(Kernel(self.where, *part, work, self.place))

    def look_up(self) -> None:
        """Check before each kernel that the run goes on. Raises: Aborted."""
        if self.switch.aborted:
            raise Aborted(f"rank {self.rank} was ended because another rank failed")
        self.ticks += 1

    def scope(
        self, *, step: int | None = None, phase: Phase | None = None, unit: str | None = None, slot: int | None = None
    ) -> AbstractContextManager[None]:
        """Record events inside `with device.scope(unit="h.0"):` under that scope."""
        before = self.where
        return _Within(
            self,
            Scope(
                before.step if step is None else step,
                before.phase if phase is None else phase.value,
                before.unit if unit is None else unit,
                before.slot if slot is None else slot,
            ),
        )

    def move(self, where: Scope) -> None:
        """Continue in another scope. Buffers that died before were freed in the old one."""
        if self.recorder.dead:
            self.recorder.settle()
        self.where = self.recorder.where = where

    @property
    def is_training(self) -> bool:
        """False in the phase EVALUATE, which has no dropout."""
        return self.where.phase != Phase.EVALUATE.value

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        return self.scope(phase=phase)

    def mark(self, name: str) -> None:
        """Record a named mark of the program, with a real memory pool's bytes."""
        self.recorder.add(Mark(self.where, name))
        if self.stream is not None:
            self.recorder.add(Pool(self.where, *self.stream.memory()))

    def turn(self, flat: str) -> None:
        """Record, if somebody asked for turns, that what follows may depend on whether this rank owns a flat."""
        if self.takes_turns:
            self.recorder.add(Turn(self.where, flat))

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """Keep ops inside `with device.no_grad():` from saving anything for backward."""
        before, self.grad_enabled = self.grad_enabled, False
        try:
            yield
        finally:
            self.grad_enabled = before

    @contextmanager
    def saving(self, take: Callable[[Iterable[object]], None]) -> Iterator[None]:
        """Give `take` what each op saves inside `with device.saving(take):`."""
        before, self.on_save = self.on_save, take
        try:
            yield
        finally:
            self.on_save = before

    def _record_news(self) -> None:
        """Record the allocator's actions for a request: segments taken and given back, bytes moved."""
        for event, numbers in self._allocator.changes:
            self.recorder.add(event(self.where, *numbers))
        self._allocator.forget()

    def _out_of_memory(self, nbytes: int, kind: Kind, memory: str) -> OutOfMemory:
        allocator = self.memories.allocators[memory]
        capacity, room = allocator.capacity or 0, allocator.room(nbytes)
        where = " of ".join(part for part in (self.where.phase, self.where.unit) if part)
        if isinstance(allocator, Share):
            pool = allocator.pool
            return out_of_node(
                pool.name, memory, pool.held, capacity, rank=self.rank, where=where, requested=nbytes, kind=kind.value
            )
        left = room and (
            f": {format_bytes(room.free_bytes)} are free, the largest hole has {format_bytes(room.largest_hole)}, "
            f"{format_bytes(room.reserved_bytes)} are reserved"
        )
        moved = f"; {self.pages}" if self.pages is not None and memory == DEVICE else ""
        return OutOfMemory(
            f"rank {self.rank} is out of {CALLED.get(memory, 'memory')} in {where}: {format_bytes(nbytes)} for {kind} "
            f"do not fit into a capacity of {format_bytes(capacity)}{left or ''}{moved}",
            rank=self.rank,
            requested=nbytes,
            kind=kind.value,
            capacity=capacity,
            where=where,
            room=room,
            memory=memory,
        )
