"""MPI's own collectives: Ireduce_scatter_block, Iallgather, Iallreduce, Ialltoallv, Ibcast, Ireduce.

Before each call, the members send each other its description (headers without parts): MPI itself would hang, or mix up
bytes, if calls do not match. Sums are in MPI's order. MPI adds fp32 and fp64 itself; for the half types it calls back:
two parts are added in fp32 and rounded to the half type, at each of its hops. avg is the sum, divided by N at the end;
for half types each part is divided first, because a sum of fp16 could overflow where the average does not.

Source: MPI 4.1, chapter 6 (nonblocking collectives) and 7.4.2 (MPI_Comm_create_group).
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from zerosim.backends.kernels import Backend, Native
from zerosim.backends.numpy.ops import array_over
from zerosim.comm.transports.mpi.staging import bytes_of
from zerosim.comm.transports.mpi.wire import Wire
from zerosim.dtypes import DType
from zerosim.errors import InputError

MAX_COUNT = 2**31 - 1


class NativeCall:
    """One collective in flight on one group."""

    def __init__(self, engine: NativeEngine, group: tuple[int, ...], native: Native, dtype: DType) -> None:
        self._engine = engine
        self._group = group
        self._native = native
        self._dtype = dtype
        self._requests: list[Any] | None = None
        self._held: list[Any] = []  # temporaries that MPI reads
        self._late: list[tuple[Any, Any]] = []  # (temporary, output): copied when everything has arrived

    def is_done(self) -> bool:
        """Start the call once the group has a communicator. Return True once its outputs are filled."""
        if self._requests is None:
            communicator = self._engine.communicator(self._group, self._native.number)
            if communicator is None:
                return False
            pairs = zip(self._native.inputs, self._native.outputs, strict=True)
            self._requests = [self._start(communicator, source, out) for source, out in pairs]
        if not self._engine.wire.are_done(self._requests):
            return False
        backend = self._engine.backend
        for temporary, out in self._late:
            backend.copy(temporary, out)
        if self._dtype.is_half:
            return True  # already divided
        is_holder = self._native.op != "reduce" or self._group.index(self._engine.wire.process) == self._native.root
        if self._native.reduction == "avg" and is_holder:
            for out in self._native.outputs:
                backend.divide(out, float(len(self._group)), out)
        return True

    def _start(self, communicator: Any, source: Any, out: Any) -> Any:
        op, root, mpi = self._native.op, self._native.root, self._engine.wire.mpi
        if self._native.reduction == "avg" and self._dtype.is_half:
            source = self._divided(source, out)
        kind = self._engine.datatype(self._dtype)
        given, taken = self._whole(source, kind), self._whole(out, kind)
        overlap = _overlap(source, out, mpi)
        own = mpi.IN_PLACE if overlap else given
        add = self._engine.reduction(self._native.reduction, self._dtype) if self._native.reduction else None
        match op:
            case "broadcast":
                return communicator.Ibcast(taken, root)
            case "all_gather":
                return communicator.Iallgather(own, [bytes_of(out), out.size // len(self._group), kind])
            case "all_to_all":
                sent, received = map(list, self._native.splits)
                return communicator.Ialltoallv([bytes_of(source), sent, kind], [bytes_of(out), received, kind])
            case "all_reduce":
                return communicator.Iallreduce(own, taken, add)
            case "reduce" if communicator.Get_rank() != root:
                return communicator.Ireduce(given, None, add, root)
            case "reduce":
                return communicator.Ireduce(own, taken, add, root)
            case "reduce_scatter":
                if overlap:
                    temporary = self._engine.backend.empty((out.size,), self._dtype)
                    self._late.append((temporary, out))
                    taken = self._whole(temporary, kind)
                return communicator.Ireduce_scatter_block([bytes_of(source), out.size, kind], taken, add)
            case _:
                raise InputError(f"collective native: MPI has no {op!r}: choose direct or ring")

    def _divided(self, source: Any, out: Any) -> Any:
        """Return this member's part of an average, divided in place if all of it is overwritten anyway."""
        is_overwritten = self._native.op == "all_reduce" and _overlap(source, out, self._engine.wire.mpi)
        target = source if is_overwritten else self._engine.backend.empty((source.size,), self._dtype)
        self._engine.backend.divide(source, float(len(self._group)), target)
        self._held.append(target)
        return target

    def _whole(self, array: Any, kind: Any) -> list[Any]:
        if array.size > MAX_COUNT:
            raise InputError(
                f"collective native: {array.size} elements in one buffer, but MPI counts to {MAX_COUNT}: choose "
                "direct or ring, which split it"
            )
        return [bytes_of(array), array.size, kind]


class NativeEngine:
    """What native calls of one process share: communicators by group, datatypes, reductions."""

    def __init__(self, wire: Wire, backend: Backend) -> None:
        self.wire = wire
        self.backend = backend
        self._communicators: dict[tuple[int, ...], Any] = {tuple(range(wire.processes)): wire.collective}
        self._making: dict[tuple[int, ...], threading.Thread] = {}
        self._datatypes: dict[str, Any] = {
            "fp32": wire.mpi.FLOAT,
            "fp64": wire.mpi.DOUBLE,
            "int64": wire.mpi.INT64_T,
            "int32": wire.mpi.INT32_T,
        }
        self._reductions: dict[tuple[str, str], Any] = {}

    def communicator(self, group: tuple[int, ...], number: int) -> Any:
        """Return the group's communicator; None while it is being made.

        MPI makes it in a call that blocks until every member is in it, and members may come to several groups in
        different orders, so another thread waits in that call. `number` distinguishes groups that share members.

        Raises: InputError if the library may not be called by several threads.
        """
        found = self._communicators.get(group)
        if found is None and group not in self._making:
            mpi = self.wire.mpi
            if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
                raise InputError(
                    "collective native on a subset of the ranks needs an MPI with MPI_THREAD_MULTIPLE, which this "
                    "MPI lacks: choose direct or ring"
                )
            maker = threading.Thread(target=self._make, args=(group, number), name="communicator", daemon=True)
            self._making[group] = maker
            maker.start()
        return found

    def _make(self, group: tuple[int, ...], number: int) -> None:
        members = self.wire.world.Get_group().Incl(list(group))
        self._communicators[group] = self.wire.world.Create_group(members, number)

    def datatype(self, dtype: DType) -> Any:
        if dtype.name not in self._datatypes:
            self._datatypes[dtype.name] = self.wire.mpi.BYTE.Create_contiguous(dtype.itemsize).Commit()
        return self._datatypes[dtype.name]

    def reduction(self, name: str, dtype: DType) -> Any:
        """Return MPI's own reduction, or one that calls the backend's kernel. avg adds: it divides later."""
        name = "max" if name == "max" else "sum"
        mpi = self.wire.mpi
        if not dtype.is_half:
            return mpi.MAX if name == "max" else mpi.SUM
        if (name, dtype.name) not in self._reductions:
            kernel = partial(_reduce, self.backend, name, dtype)
            self._reductions[name, dtype.name] = mpi.Op.Create(kernel, commute=True)
        return self._reductions[name, dtype.name]

    def close(self) -> None:
        """Free what MPI made for the calls, except the groups' communicators, which may still be in use."""
        for op in self._reductions.values():
            op.Free()
        self._reductions.clear()


def _reduce(backend: Backend, name: str, dtype: DType, given: Any, taken: Any, datatype: Any) -> None:
    """Set taken = given + taken, or their maximum. MPI calls it while it reduces."""
    ours, theirs = array_over(taken, dtype), array_over(given, dtype)
    backend.reduce((theirs, ours), name, ours)


def _overlap(a: Any, b: Any, mpi: Any) -> bool:
    """Return whether two contiguous arrays share memory."""
    starts = mpi.Get_address(bytes_of(a)), mpi.Get_address(bytes_of(b))
    return bool(starts[0] < starts[1] + b.nbytes and starts[1] < starts[0] + a.nbytes)
