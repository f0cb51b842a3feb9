"""What DeepSpeed's ZeRO-2 holds on the host from start to end, beside masters and states.

    gradient    4 Psi/N, fp32: a reduced gradient is cast into it in the step's last microbatch
    staging     2 Psi/N, the half type: new parameters pass through it to the device (here from the first step on)
    sums        2 Psi/N, the half type, with several microbatches: gradients are added there in their own format

With the master and Adam's states, which the first step makes, that is 18 Psi/N. Source: DeepSpeed 0.19.8,
stage_1_and_2.py (single_partition_of_fp32_groups[i].grad; param_buffer_of_bit16_for_cpu_offload_groups;
accumulated_grads_in_cpu, which holds whole tensors where a slice cuts one: here only the slice).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zerosim.config import RunConfig
from zerosim.config.parts.offload import has_host_buffers
from zerosim.device.away import Away
from zerosim.device.device import Buffer, Kind
from zerosim.device.events import CPU
from zerosim.parallel.offload import OffloadedGradients, OffloadedStep, shards_of
from zerosim.parallel.pieces import Pieces, Place
from zerosim.placement.memories import HOST
from zerosim.tensor.flat import Flat


class BufferedGradients(OffloadedGradients):
    """Gradients whose sums stay in half types until the last of `times` microbatches, and are then cast."""

    def __init__(self, home: str, left: Callable[[Flat], None], *, as_it_goes: bool, times: int) -> None:
        super().__init__(home, left, as_it_goes=as_it_goes)
        self.times = times if as_it_goes else 1
        self._sums: dict[str, Buffer] = {}  # by flat, from the first step on
        self._count: dict[str, int] = {}

    def send(self, flat: Flat, grad: Buffer) -> None:
        count = self._count[flat.name] = self._count.get(flat.name, 0) % self.times + 1
        out = Away(grad, padding=flat.own_padding)
        out.leave(Kind.GRAD)
        self._leaving.push(out)
        part, device = out.wait(CPU), flat.device
        with device.at(HOST):
            if self.times > 1:
                into = self._sums.get(flat.name)
                if into is None:
                    into = self._sums[flat.name] = device.alloc(part.shape, part.dtype, Kind.TEMP)
                kernel = device.backend.copy if count == 1 else device.backend.add
                arrays = (part.array, into.array) if count == 1 else (into.array, part.array, into.array)
                device.kernel(0 if count == 1 else part.numel, kernel, *arrays)
                part = into
            if count == self.times:
                flat.keep_grad_shard(part)
        self.left(flat)


class StagedStep(OffloadedStep):
    """An update whose new parameters pass through a buffer that lives to the end."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self._staging: dict[str, Buffer] = {}  # by flat

    def rounded(self, flat: Flat, shard: Buffer) -> Buffer:
        if flat.name not in self._staging:
            self._staging[flat.name] = super().rounded(flat, shard)
        return self._staging[flat.name]


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add the host's buffers."""
    if not has_host_buffers(config.grads, config.offload, config.precision):
        return made
    gradients = partial(BufferedGradients, times=config.data.accumulate if config.grads.sync else 1)
    step = partial(shards_of, config.offload, place, make_step=lambda _, at: StagedStep(at), make_gradients=gradients)
    return made._replace(shards=step)
