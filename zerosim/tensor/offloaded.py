"""Model states outside the device: ZeRO-Offload (2101.06840) and ZeRO-Infinity (2104.07857).

    gradients     a reduced local shard goes to its memory during backward, one copy in flight (`Outgoing`)
    parameters    a local shard comes to the device before each gather, from NVMe through the host (`Incoming`); the
                  optimizer step's result goes back (`store_params`)
    optimizer     states on NVMe pass through the host, some flats at a time: read, step and write overlap (`tiles`)

Nothing computes on NVMe, and the device computes nothing on the host: the host's CPU updates the states that are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from zerosim.backends.kernels import Array
from zerosim.backends.numpy.files import FileArray
from zerosim.device.copies import CONTROL, Copying, launch_copy
from zerosim.device.device import Buffer, Kind
from zerosim.device.events import COMPUTE, CPU
from zerosim.placement.memories import DEVICE, HOST, NVME
from zerosim.placement.mesh import MODEL

if TYPE_CHECKING:
    from zerosim.placement.layout import Layout
    from zerosim.tensor.accumulation import GradAccumulator
    from zerosim.tensor.flat import Flat
    from zerosim.tensor.late import LateParams

TO_DEVICE, TO_NVME, FROM_NVME = f"{HOST} to {DEVICE}", f"{HOST} to {NVME}", f"{NVME} to {HOST}"


# -- gradients ----------------------------------------------------------------------------------------------------
class Outgoing:
    """A rank's reduced gradients on their way to another memory, one copy in flight. After the last of a flat's
    gradients come its delayed new parameters (`late.py`).

    as_it_goes   each gradient leaves when it is reduced. Without, all leave when backward ends, because other axes of
                 the mesh add to local shards on the device
    """

    def __init__(self, layout: Layout) -> None:
        self.as_it_goes = layout.mesh.size("dp_replicate", *MODEL) == 1
        self.late: dict[str, LateParams] = {}  # by flat
        self.last_slot = 0  # of the step's microbatches
        self._last: list[Copying] = []

    def send(self, flat: GradAccumulator, grad: Buffer) -> None:
        """Send a local shard from the device to the flat's memory, and add it to the sum there."""
        device, there = flat.device, flat.grad_shard
        host = _new_grad(flat, HOST)
        out = launch_copy(grad, host)
        self.wait()
        self._last = [out]
        if flat.grad_memory == HOST:
            out.wait(CPU)
            with device.at(HOST):
                flat.keep_grad_shard(host)
        elif there is None:
            flat.grad_shard = _new_grad(flat, NVME)
            out.wait(TO_NVME)
            self._last.append(launch_copy(host, flat.grad_shard))
        else:  # the sum of earlier microbatches comes to the host, and goes back
            earlier = grad_on_hand(flat)
            out.wait(CPU)
            assert earlier is not None
            with device.at(HOST):
                device.kernel(host.numel, device.backend.add, earlier.array, host.array, host.array)
            self._last.append(launch_copy(host, there, after=CPU))
        if flat.name in self.late and device.where.slot == self.last_slot:
            self.late[flat.name].launch()

    def wait(self) -> None:
        """Wait until the copy in flight has arrived."""
        for copy in self._last:
            copy.wait()
        self._last = []

    def finish(self, flats: Sequence[GradAccumulator]) -> None:
        """Send what is left when backward ends, and wait until all gradients have arrived."""
        for flat in reversed(flats):
            if flat.grad_memory != DEVICE and flat.grad_shard is not None and flat.grad_shard.memory == DEVICE:
                grad, flat.grad_shard = flat.grad_shard, None
                with flat.device.scope(unit=flat.spec.module):
                    self.send(flat, grad)
        self.wait()


def _new_grad(flat: GradAccumulator, memory: str) -> Buffer:
    own = flat.own
    return flat.device.alloc((own.size,), flat.grad_dtype, Kind.GRAD, padding=flat.own_padding, memory=memory)


# -- parameters ---------------------------------------------------------------------------------------------------
class Incoming:
    """One flat's local shard on its way to the device: ZeRO-Infinity's nc (NVMe to host) and cg (host to device)."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.staged: Copying | None = None
        self.lifted: Copying | None = None

    def stage(self) -> None:
        """Copy it from NVMe to the host."""
        flat = self.flat
        if self.staged is None and flat.shard().memory == NVME:
            host = flat.device.alloc((flat.own.size,), flat.dtype, Kind.COMM, padding=flat.own_padding, memory=HOST)
            self.staged = launch_copy(flat.shard(), host)

    def lift(self, kind: Kind) -> Copying:
        """Copy it to the device, into a buffer of `kind`."""
        if self.lifted is None:
            self.stage()
            flat = self.flat
            source = flat.shard() if self.staged is None else self.staged.wait(TO_DEVICE)
            self.lifted = launch_copy(
                source, flat.device.alloc(source.shape, flat.dtype, kind, padding=flat.own_padding)
            )
        return self.lifted


def store_params(flat: Flat, into: Buffer | None = None) -> None:
    """Round the updated masters into the local shard of the parameters, or a buffer like it, in whichever memories
    these two lie. Masters on NVMe are on the host now (`tiles`)."""
    assert flat.master is not None
    device, master, shard = flat.device, flat.master, into or flat.shard()
    with device.at(master.memory):
        rounded = shard
        if shard.memory != master.memory:
            rounded = device.alloc(shard.shape, shard.dtype, Kind.TEMP)
        device.kernel(0, device.backend.copy, master.array, rounded.array)
    if rounded is shard:
        return
    if rounded.memory == DEVICE and shard.memory == NVME:
        host = device.alloc(shard.shape, shard.dtype, Kind.TEMP, memory=HOST)
        rounded = launch_copy(rounded, host).wait(CPU)
    copy = launch_copy(rounded, shard, after=CPU if rounded.memory == HOST else COMPUTE)
    if shard.memory == NVME:
        flat.leaving = copy  # the host's buffer stays until it has been written (`tiles`)
    else:
        copy.wait()


def put(array: Array, into: Buffer | None) -> None:
    """Store an array's values in a buffer, rounded as it rounds them, if there is one. This is no copy of a step, and
    not recorded."""
    if into is None or into.array is array:
        return
    backend = into.device.backend
    if isinstance(into.array, FileArray):
        backend.copy(array, rounded := backend.empty(into.shape, into.dtype))
        into.array.write(rounded)
    else:
        backend.copy(array, into.array)


def write(values: Any, into: Buffer) -> None:
    """Store a host array's values in the same way."""
    backend = into.device.backend
    if isinstance(into.array, FileArray):
        backend.from_host(values, rounded := backend.empty(into.shape, into.dtype))
        into.array.write(rounded)
    else:
        backend.from_host(values, into.array)


def memory_of(flat: Flat) -> str:
    """Name the memory of the flat's optimizer states."""
    return flat.held.rows["optim"].memory if "optim" in flat.held.rows else DEVICE


# -- the optimizer step -------------------------------------------------------------------------------------------
def place_of(flats: Sequence[Flat]) -> str:
    """Return where the optimizer step runs: on the device, or on its host's CPU."""
    return HOST if any(flat.spec.is_trained and flat.held.rows["optim"].memory != DEVICE for flat in flats) else DEVICE


def norm_place(flats: Sequence[GradAccumulator]) -> str:
    """Return where the squares of gradients are added up."""
    return HOST if any(flat.grad_memory != DEVICE for flat in flats) else DEVICE


def moved(buffer: Buffer, memory: str) -> Buffer:
    """Return a norm's sums in that memory: a copy, if they lie in another one."""
    if buffer.memory == memory:
        return buffer
    there = buffer.device.alloc(buffer.shape, buffer.dtype, Kind.TEMP, memory=memory)
    to_host = memory == HOST
    copy = launch_copy(buffer, there, after=COMPUTE if to_host else CPU, purpose=CONTROL)
    if to_host:
        copy.wait(CPU)
    return copy.wait()


def grad_on_hand(flat: GradAccumulator) -> Buffer | None:
    """Return the local shard of the gradient in readable memory: one on NVMe in a buffer of the host."""
    grad = flat.grad_shard
    if grad is None or grad.memory != NVME:
        return grad
    return launch_copy(grad, _new_grad(flat, HOST)).wait(CPU)


class _Tile:
    """Flats that are updated together, and their buffers that come from NVMe and go back."""

    def __init__(self, flats: list[Flat]) -> None:
        self.flats = flats
        self._home: list[tuple[Flat, dict[str, Buffer], Buffer | None]] = []
        self._copies: list[Copying] = []

    def read(self) -> None:
        """Launch the copies of states and gradients to the host."""
        for flat in self.flats:
            with flat.device.scope(unit=flat.spec.module):
                if (grad := flat.grad_shard) is not None and grad.memory == NVME:
                    self._copies.append(launch_copy(grad, _new_grad(flat, HOST), after=CPU))
                    flat.grad_shard = self._copies[-1].target
                if not flat.spec.is_trained or flat.held.rows["optim"].memory != NVME:
                    continue
                self._home.append((flat, dict(flat.states), flat.master))
                flat.states = {name: self._brought(state) for name, state in flat.states.items()}
                flat.master = None if flat.master is None else self._brought(flat.master)

    def _brought(self, state: Buffer) -> Buffer:
        host = state.device.alloc(state.shape, state.dtype, Kind.OPTIM, memory=HOST)
        self._copies.append(launch_copy(state, host, after=CPU))
        return host

    def wait(self) -> None:
        for copy in self._copies:
            copy.wait(CPU)
        self._copies.clear()

    def write(self) -> None:
        """Launch the copies back; the host's buffers stay until these are waited for."""
        for flat, states, master in self._home:
            with flat.device.scope(unit=flat.spec.module):
                for name, state in states.items():
                    self._copies.append(launch_copy(flat.states[name], state, after=CPU))
                if master is not None and flat.master is not None:
                    self._copies.append(launch_copy(flat.master, master, after=CPU))
            flat.states, flat.master = states, master
        self._home.clear()
        for flat in self.flats:
            if flat.leaving is not None:
                self._copies.append(flat.leaving)
                flat.leaving = None


def tiles(groups: Iterable[list[Flat]]) -> Iterator[list[Flat]]:
    """Yield groups of flats that are updated together, each with its states at hand. While one is updated, the next is
    read from NVMe and the one before is written: three tiles are on the host at most."""
    coming = deque(_Tile(group) for group in groups)
    written: _Tile | None = None
    if coming:
        coming[0].read()
    while coming:
        tile = coming.popleft()
        if coming:
            coming[0].read()
        tile.wait()
        yield tile.flats
        if written is not None:
            written.wait()
        tile.write()
        written = tile
    if written is not None:
        written.wait()
