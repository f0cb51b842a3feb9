"""Local shards outside the device: ZeRO-Offload (2101.06840) and ZeRO-Infinity (2104.07857).

    gradients    a reduced local shard goes to its memory during backward, one copy in flight
    parameters   a local shard comes to the device before each gather, from NVMe through the host; the optimizer step's
                 result goes back
    step         states on NVMe pass through the host, some flats at a time: read, step and write overlap

Nothing computes on NVMe, and the device computes nothing on the host: the host's CPU updates the states that are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from zerosim.config import RunConfig
from zerosim.config.parts.offload import FSDP2, OffloadConfig
from zerosim.device.away import Away, Window
from zerosim.device.device import Buffer, Kind
from zerosim.device.events import COMPUTE, CPU
from zerosim.optim.updater import Updater
from zerosim.parallel.pieces import Pieces, Place
from zerosim.parallel.shards import Gradients, Parameters, Shards, Step
from zerosim.placement.memories import DEVICE, HOST, NVME
from zerosim.placement.mesh import MODEL
from zerosim.tensor.flat import Flat


class OffloadedGradients(Gradients):
    """Reduced gradients in another memory, `home`.

    as_it_goes   each gradient leaves when it is reduced. Without, all leave when backward ends, because other axes of
                 the mesh add to local shards on the device
    left         called with a flat whose gradient leaves
    """

    place = HOST

    def __init__(self, home: str, left: Callable[[Flat], None], *, as_it_goes: bool) -> None:
        self.home, self.left, self.as_it_goes = home, left, as_it_goes
        self._leaving = Window(1)

    def keep(self, flat: Flat, grad: Buffer | None) -> None:
        if grad is None or not self._leaves(flat, grad):
            flat.add_grad_shard(grad)

    def keep_in_place(self, flat: Flat, own: Buffer | None) -> None:
        if own is None or not self._leaves(flat, own):
            flat.grad_shard = own

    def _leaves(self, flat: Flat, grad: Buffer) -> bool:
        if self.as_it_goes:
            self.send(flat, grad)
        return self.as_it_goes

    def send(self, flat: Flat, grad: Buffer) -> None:
        """Send a local shard from the device to its memory, and add it to the sum there."""
        device, there = flat.device, flat.grad_shard
        out = Away(grad, padding=flat.own_padding)
        out.leave(Kind.GRAD)
        self._leaving.push(out)
        if self.home == HOST:
            host = out.wait(CPU)
            with device.at(HOST):
                flat.keep_grad_shard(host)
        elif there is None:
            out.leave(Kind.GRAD, NVME)
            flat.grad_shard = out.buffer
        else:  # the sum of earlier microbatches comes to the host, and goes back
            earlier, host = self.grad(flat), out.wait(CPU)
            assert earlier is not None
            with device.at(HOST):
                device.kernel(host.numel, device.backend.add, earlier.array, host.array, host.array)
            out.launch(there, after=CPU)
        self.left(flat)

    def end_backward(self, flats: Sequence[Flat]) -> None:
        for flat in reversed(flats):
            if flat.grad_shard is not None and flat.grad_shard.memory == DEVICE:
                grad, flat.grad_shard = flat.grad_shard, None
                with flat.device.scope(unit=flat.spec.module):
                    self.send(flat, grad)
        self._leaving.settle()

    def grad(self, flat: Flat) -> Buffer | None:
        grad = flat.grad_shard
        if grad is None or grad.memory != NVME:
            return grad
        there = Away(grad, padding=flat.own_padding)
        there.fetch(Kind.GRAD, HOST)
        return there.wait(CPU)


class UnwaitedGradients(OffloadedGradients):
    """Gradients on the host as PyTorch's CPUOffloadPolicy sends them: compute and the CPU wait when a microbatch's
    backward ends.

    The device's buffer is freed when its copy is launched: PyTorch's allocator gives those bytes to later work of the
    same stream. A later microbatch's copy is waited for at once, because the CPU adds it to the sum. Source: PyTorch
    2.13, _fsdp_collectives.py (foreach_reduce), _fsdp_param_group.py (finalize_backward).
    """

    def __init__(self, home: str, left: Callable[[Flat], None], *, as_it_goes: bool) -> None:
        super().__init__(home, left, as_it_goes=as_it_goes)
        self._unwaited: list[Away] = []

    def send(self, flat: Flat, grad: Buffer) -> None:
        if flat.grad_shard is not None:
            super().send(flat, grad)
            self._leaving.settle()
            return
        out = Away(grad, padding=flat.own_padding)
        out.leave(Kind.GRAD)
        out.release()
        flat.keep_grad_shard(out.buffer)
        self._unwaited.append(out)
        self.left(flat)

    def end_backward(self, flats: Sequence[Flat]) -> None:
        super().end_backward(flats)
        self.close_backward()

    def close_backward(self) -> None:
        for out in self._unwaited:
            out.wait(CPU)
            out.settle()
        self._unwaited.clear()


class OffloadedParameters(Parameters):
    """Parameters in another memory: ZeRO-Infinity's nc (NVMe to host) and cg (host to device, into the local shard's
    place in the whole buffer)."""

    def __init__(self) -> None:
        self._coming: dict[str, Away] = {}  # by flat

    def is_away(self, flat: Flat) -> bool:
        return flat.param_shard is not None and flat.param_shard.memory != DEVICE

    def param(self, flat: Flat, kind: Kind) -> Buffer:
        if not self.is_away(flat):
            return flat.own_param(kind)
        self.fetch(flat)
        coming = self._coming.pop(flat.name)
        coming.fetch(kind)
        return coming.take()

    def bring(self, flat: Flat, into: Buffer, by: str) -> None:
        if not self.is_away(flat):
            flat.cast_into(into)
            return
        self.fetch(flat)
        self._coming[flat.name].launch(into)
        self._coming[flat.name].wait(by)

    def fetch(self, flat: Flat) -> None:
        if self.is_away(flat):
            if (coming := self._coming.get(flat.name)) is None:
                coming = self._coming[flat.name] = Away(flat.shard(), padding=flat.own_padding)
            coming.fetch(Kind.COMM, HOST)

    def drop(self, flat: Flat) -> None:
        self._coming.pop(flat.name, None)


class OffloadedStep(Step):
    """An update of states, or into parameters, in another memory. `place`: the device, or the host's CPU."""

    def __init__(self, place: str = HOST) -> None:
        self.place = place
        self._written: dict[str, Away] = {}  # new parameters on their way to NVMe, by flat

    def store(self, flat: Flat) -> None:
        if flat.param_shard is not None:
            self.round_into(flat.param_shard, flat)

    def round_into(self, shard: Buffer, flat: Flat) -> None:
        """Round the updated master into a local shard of the parameters, in whichever memories these two are. A master
        on NVMe is on the host now (`tiles`)."""
        if (master := flat.master) is None:
            return
        device, rounded = flat.device, shard
        with device.at(master.memory):
            if shard.memory != master.memory:
                rounded = self.rounded(flat, shard)
            device.kernel(0, device.backend.copy, master.array, rounded.array)
        if rounded is shard:
            return
        if rounded.memory == DEVICE and shard.memory == NVME:
            host = Away(rounded)
            host.leave(Kind.TEMP)
            rounded = host.wait(CPU)
        back = Away(rounded)
        back.launch(shard, after=CPU if rounded.memory == HOST else COMPUTE)
        if shard.memory == NVME:
            self._written[flat.name] = back  # the host's buffer stays until it has been written
        else:
            back.settle()

    def rounded(self, flat: Flat, shard: Buffer) -> Buffer:
        """Return room for a rounded master, on its way to another memory."""
        return flat.device.alloc(shard.shape, shard.dtype, Kind.TEMP)

    def tiles(self, groups: Iterable[list[Flat]]) -> Iterator[list[Flat]]:
        """Yield the groups with their states on the host. While one is updated, the next is read from NVMe and the one
        before is written: three are there at most."""
        coming = deque(_Tile(group) for group in groups)
        written: _Tile | None = None
        if coming:
            coming[0].read()
        while coming:
            tile = coming.popleft()
            if coming:
                coming[0].read()
            tile.settle()
            yield tile.flats
            if written is not None:
                written.settle()
            tile.write(self._written)
            written = tile
        if written is not None:
            written.settle()


class _Tile:
    """Flats that are updated together, and their buffers that come from NVMe and go back."""

    def __init__(self, flats: list[Flat]) -> None:
        self.flats = flats
        self._home: list[tuple[Flat, dict[str, Buffer], Buffer | None]] = []
        self._moving: list[Away] = []

    def read(self) -> None:
        """Launch the copies of states and gradients to the host."""
        for flat in self.flats:
            with flat.device.scope(unit=flat.spec.module):
                if (grad := flat.grad_shard) is not None and grad.memory == NVME:
                    flat.grad_shard = self._brought(grad, Kind.GRAD, flat.own_padding)
                if flat.held.memory("optim") == NVME:
                    self._home.append((flat, dict(flat.states), flat.master))
                    flat.states = {name: self._brought(state) for name, state in flat.states.items()}
                    flat.master = None if flat.master is None else self._brought(flat.master)

    def _brought(self, state: Buffer, kind: Kind = Kind.OPTIM, padding: int = 0) -> Buffer:
        self._moving.append(one := Away(state, padding=padding))
        one.fetch(kind, HOST, after=CPU)
        return one.buffer

    def settle(self) -> None:
        """Let the CPU wait for the copies in flight."""
        for one in self._moving:
            one.settle(CPU)
        self._moving.clear()

    def write(self, params: dict[str, Away]) -> None:
        """Launch the copies back. The host's buffers stay until these are waited for, as those of new `params`."""
        for flat, states, master in self._home:
            with flat.device.scope(unit=flat.spec.module):
                for name, state in states.items():
                    self._goes_back(flat.states[name], state)
                if master is not None and flat.master is not None:
                    self._goes_back(flat.master, master)
            flat.states, flat.master = states, master
        self._home.clear()
        self._moving += [params.pop(flat.name) for flat in self.flats if flat.name in params]

    def _goes_back(self, state: Buffer, home: Buffer) -> None:
        self._moving.append(one := Away(state))
        one.launch(home, after=CPU)


def shards_of(
    offload: OffloadConfig,
    place: Place,
    updater: Updater,
    make_step: Callable[[Parameters, str], OffloadedStep] | None = None,
    make_gradients: Callable[..., OffloadedGradients] = OffloadedGradients,
) -> Shards:
    """Return the local shards of the rank at a place, in the memories of --offload."""
    assert place.groups is not None
    parameters = Parameters() if offload.memory_of("params") == DEVICE else OffloadedParameters()
    at = HOST if offload.cpu_steps else DEVICE
    step = OffloadedStep(at) if make_step is None else make_step(parameters, at)
    gradients, home = Gradients(), offload.memory_of("grads")
    if home != DEVICE:
        alone = place.groups.mesh.size("dp_replicate", *MODEL) == 1
        make = UnwaitedGradients if offload.policy == FSDP2 else make_gradients
        gradients = make(home, step.left, as_it_goes=alone)
    return Shards(gradients, parameters, step)


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add the memories of local shards. States on NVMe are stepped in tiles of one flat or more."""
    offload = config.offload
    if not offload.is_on:
        return made
    return made._replace(
        rows=partial(made.rows, memories=offload.by_state),
        shards=partial(shards_of, offload, place),
        cpu_steps=offload.cpu_steps,
        sub_group=made.sub_group or int(offload.memory_of("optimizer") == NVME),
    )
