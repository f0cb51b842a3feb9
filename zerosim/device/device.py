"""A simulated device: every allocation and every kernel of a rank passes through here and is recorded.

Memory is counted at `Device.alloc` and where a buffer's storage dies; work at `Device.kernel`. Arithmetic
is done in `backends/`, totals are computed in `ledger/`. A storage owns its array, so that the life of the
object is the life of the bytes: no cycle may hold one (it must die at once). The recorder watches for its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from typing import Any, ParamSpec
from weakref import ref

from zerosim.backends.kernels import Array, Backend, Stream
from zerosim.device.events import Alloc, Copy, Free, Kernel, Mark, Pool, Recorder, Refusal, Retag, Scope
from zerosim.device.memory import Allocator, Exact
from zerosim.device.work import KernelWork, work_of
from zerosim.dtypes import DType
from zerosim.errors import Aborted, OutOfMemory
from zerosim.units import format_bytes

P = ParamSpec("P")


class Kind(StrEnum):
    """What bytes are for. PARAM, GRAD and OPTIM are ZeRO's model states."""

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
    """Where in a step an event happened. The phases of curvature are those of an estimate, which follows some steps of
    some optimizers: a second forward and backward, on drawn labels, and what is done with their gradients."""

    INIT = "init"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    CURVATURE_FORWARD = "curvature_forward"
    CURVATURE_BACKWARD = "curvature_backward"
    CURVATURE = "curvature"
    EVALUATE = "evaluate"


class Switch:
    """Set once, by whoever ends the run; every rank looks at it before each kernel."""

    __slots__ = ("aborted",)

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class Storage:
    """The bytes themselves: owns one array, and the recorder watches for its end."""

    __slots__ = ("__weakref__", "array", "device", "id")

    def __init__(self, array: Array, device: Device, id: int) -> None:
        self.array = array
        self.id = id
        self.device = device
        recorder = device.recorder
        recorder.owners[ref(self, recorder.bury)] = Free, id  # `watch`, without the time of a call


class Buffer:
    """A handle on a storage, or on a window of it: slices and reshapes share its bytes and cost none."""

    __slots__ = ("__weakref__", "array", "dtype", "storage")  # a view of the stepper's must not keep the bytes

    def __init__(self, storage: Storage, array: Array, dtype: DType) -> None:
        self.storage = storage
        self.array = array
        self.dtype = dtype

    @property
    def device(self) -> Device:
        return self.storage.device

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
        """The same bytes under another shape. Raises: ValueError where only a copy could have it."""
        if not self.array.flags.c_contiguous:
            raise ValueError(f"a strided window of shape {self.shape} cannot be seen as {shape} without a copy")
        return Buffer(self.storage, self.array.reshape(shape), self.dtype)

    def __repr__(self) -> str:
        return f"Buffer(shape={self.shape}, dtype={self.dtype}, id={self.storage.id})"


class Device:
    """One rank's device. All state of a rank that is ambient (scope, gradient switch) lives here."""

    def __init__(
        self,
        rank: int,
        backend: Backend,
        *,
        allocator: Allocator | None = None,
        recorder: Recorder | None = None,
        switch: Switch | None = None,
        stream: Stream | None = None,
    ) -> None:
        self.rank = rank
        self.backend = backend
        self.stream = stream  # where kernels queue, for a backend that queues them
        self._allocator = allocator or Exact()
        self.recorder = recorder or Recorder()
        self.recorder.release = self._allocator.release
        self.switch = switch or Switch()
        self.where = Scope()
        self.grad_enabled = True
        self._last_id = 0
        self.ticks = 0  # grows with every kernel, so that a watcher can tell a slow rank from a stuck one

    @property
    def allocator(self) -> Allocator:
        """The allocator, when all dead bytes have been taken back."""
        self.recorder.settle()
        return self._allocator

    def next_id(self) -> int:
        """A number that names one buffer or one work of this rank."""
        self._last_id += 1
        return self._last_id

    def alloc(self, shape: tuple[int, ...], dtype: DType, kind: Kind, *, padding: int = 0, name: str = "") -> Buffer:
        """A new buffer, its contents undefined. `padding` of its elements belong to no parameter; `name` is that of an
        optimizer's state.

        Raises: OutOfMemory when the allocator refuses.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        id, reserved = self.reserve(nbytes, kind)
        try:
            array = self.backend.empty(shape, dtype)
        except BaseException:  # the host's own memory ran out
            self._allocator.release(id)
            raise
        self.recorder.add(Alloc(self.where, id, nbytes, reserved, kind.value, padding * dtype.itemsize, name))
        return Buffer(Storage(array, self, id), array, dtype)

    def reserve(self, nbytes: int, kind: Kind) -> tuple[int, int]:
        """Room for a new buffer: its id, and the bytes that the allocator takes for it. It is not recorded yet.

        Raises: OutOfMemory when the allocator refuses.
        """
        id = self.next_id()
        if self.recorder.dead:
            self.recorder.settle()
        reserved = self._allocator.reserve(id, nbytes)
        if self._allocator.news:
            self._record_news()
        if reserved is None:
            self.recorder.add(Refusal(self.where, nbytes, kind.value))
            raise self._out_of_memory(nbytes, kind)
        return id, reserved

    def retag(self, buffer: Buffer, kind: Kind) -> None:
        """The same bytes serve another purpose from here on."""
        self.recorder.add(Retag(self.where, buffer.storage.id, kind.value))

    def kernel(self, flops: int, run: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run one of the backend's kernels and record it: its flops, and the bytes of its arrays."""
        self.look_up()
        if self.recorder.enabled:
            self.recorder.add(Kernel(self.where, *work_of(run.__name__, flops, args)))
        run(*args, **kwargs)

    def kernels(
        self, parts: Sequence[KernelWork], run: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Run one kernel of the backend that is several of a device's, and record those."""
        for part in parts:
            self.count(part)
        run(*args, **kwargs)

    def product(self, name: str, run: Callable[..., None], left: Array, right: Array, *rest: Array | None) -> None:
        """Run a product of left (M, K) and right (K, N), and record it as `name`: 'linear' or one of its backward."""
        (rows, inner), columns = left.shape, right.shape[1]
        work = work_of(run.__name__, 2 * rows * inner * columns, (left, right, *rest))
        self.kernels((work._replace(name=name, shape=(rows, inner, columns)),), run, left, right, *rest)

    def count(self, part: KernelWork, work: int | None = None) -> None:
        """Record work that is this rank's, whoever runs it (a collective's sums run where the last rank joins).

        Raises: Aborted when the run has been ended.
        """
        self.look_up()
        if self.recorder.enabled:
            self.recorder.add(Kernel(self.where, *part, work))

    def copy(self, source: str, target: str, nbytes: int) -> None:
        """Record bytes that go from one of this rank's own memories to another, 'device' and 'host' (`host.py`).

        Raises: Aborted when the run has been ended.
        """
        self.look_up()
        self.recorder.add(Copy(self.where, source, target, nbytes, "offload"))

    def look_up(self) -> None:
        """Before each kernel: is the run still on? Raises: Aborted."""
        if self.switch.aborted:
            raise Aborted(f"rank {self.rank} was ended because another rank failed")
        self.ticks += 1

    @contextmanager
    def scope(
        self, *, step: int | None = None, phase: Phase | None = None, unit: str | None = None, slot: int | None = None
    ) -> Iterator[None]:
        """`with device.scope(unit="h.0"):` what happens inside is recorded there."""
        before = self.where
        self.move(
            Scope(
                before.step if step is None else step,
                before.phase if phase is None else phase.value,
                before.unit if unit is None else unit,
                before.slot if slot is None else slot,
            )
        )
        try:
            yield
        except BaseException as error:  # the innermost scope is where it happened; a report names it
            error.__dict__.setdefault("zerosim_scope", self.where)
            raise
        finally:
            self.move(before)

    def move(self, where: Scope) -> None:
        """Go on in another scope; what died before was freed in this one."""
        if self.recorder.dead:
            self.recorder.settle()
        self.where = self.recorder.where = where

    @property
    def is_training(self) -> bool:
        """False in the phase EVALUATE, where nothing is dropped out."""
        return self.where.phase != Phase.EVALUATE.value

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        return self.scope(phase=phase)

    def mark(self, name: str) -> None:
        """Name this point of the program in the record, with what a real memory pool says of it."""
        self.recorder.add(Mark(self.where, name))
        if self.stream is not None:
            self.recorder.add(Pool(self.where, *self.stream.memory()))

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """`with device.no_grad():` ops inside keep nothing for backward."""
        before, self.grad_enabled = self.grad_enabled, False
        try:
            yield
        finally:
            self.grad_enabled = before

    def _record_news(self) -> None:
        """What the allocator did to grant a request: segments taken and given back, bytes moved."""
        for event, numbers in self._allocator.news:
            self.recorder.add(event(self.where, *numbers))
        self._allocator.forget()

    def _out_of_memory(self, nbytes: int, kind: Kind) -> OutOfMemory:
        capacity, room = self._allocator.capacity or 0, self._allocator.room(nbytes)
        where = " of ".join(part for part in (self.where.phase, self.where.unit) if part)
        left = room and (
            f": {format_bytes(room.free_bytes)} are free, the largest hole has {format_bytes(room.largest_hole)}, "
            f"{format_bytes(room.reserved_bytes)} are reserved"
        )
        return OutOfMemory(
            f"rank {self.rank} is out of memory in {where}: {format_bytes(nbytes)} for {kind} "
            f"do not fit into a capacity of {format_bytes(capacity)}{left or ''}",
            rank=self.rank,
            requested=nbytes,
            kind=kind.value,
            capacity=capacity,
            where=where,
            room=room,
        )
