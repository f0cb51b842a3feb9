"""1-bit Adam: after a warm-up, ranks exchange the signs of their momentum (arXiv 2102.02888, algorithm 1).

    warm-up      plain Adam on averaged gradients, without bias correction
    from then    v is frozen; m_i = b1 m + (1 - b1) g_i is sent as signs, with error feedback
      worker     all_to_all: each rank gets all ranks' signs of its slice, and averages them
      server     the mean, with an error of its own, becomes signs again: all_gather
    step         w -= lr m / (sqrt(v) + eps)

Sent: n/8 bytes and the scales, twice, in place of 4n, twice. Memory: the worker's error, 4 Psi, and the server's, 4 Psi
/ N. The exchange writes m over the gradient; `optim/onebit_adam.py` is the step. Stage 0 only, where every rank holds
all of m. Source: DeepSpeed edaa722, runtime/fp16/onebit/adam.py and runtime/comm/nccl.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Kind
from zerosim.parallel.compression.codecs import SIGNS, mean_of
from zerosim.parallel.compression.encoded import buffers_for, code
from zerosim.parallel.compression.powersgd import Averaged
from zerosim.parallel.exchange import AllReduce
from zerosim.parallel.gathers import AllGather
from zerosim.placement.partition import Whole, slice_size
from zerosim.placement.rows import Row
from zerosim.tensor.flat import Flat


class OneBitAdam(AllReduce):
    """`beta1` is Adam's; `warmup` steps come before signs are sent."""

    joins = False

    def __init__(self, gathers: AllGather, beta1: float, warmup: int) -> None:
        super().__init__(gathers)
        self.beta1, self.warmup, self.codec = beta1, warmup, SIGNS
        self.states = {"worker_error": Row(Whole()), "server_error": Row(Whole())}
        self.keeps = {"worker_error": "rank", "server_error": "slice"}
        self.kept: dict[tuple[str, str], Buffer] = {}

    def place(self, flat: Flat, state: str) -> None:
        ranks = self.group_of(flat).size
        own = slice_size(flat.numel, ranks)
        numel = own * ranks if state == "worker_error" else own
        self.kept[state, flat.name] = flat.device.alloc((numel,), flat.grad_dtype, Kind.OPTIM, name=state)
        flat.device.kernel(0, flat.device.backend.fill, self.kept[state, flat.name].array, 0.0)

    def launch_reduce(self, flats: Sequence[Flat], grads: list[Buffer]) -> Any:
        [flat], grad = flats, grads.pop()
        if flat.device.where.step < self.warmup:
            return super().launch_reduce(flats, [grad])
        with flat.device.scope(unit=flat.spec.module):
            self._average(flat, grad)
        return Averaged(grad)

    launch_in_place = launch_reduce

    def _average(self, flat: Flat, grad: Buffer) -> None:
        device, comm = flat.device, self.group_of(flat)
        ranks, exp_avg = comm.size, flat.states["exp_avg"]
        worker, server = (self.kept[state, flat.name] for state in ("worker_error", "server_error"))

        def momentum(xp: Any, worker: Array, exp_avg: Array, grad: Array) -> None:
            worker[: grad.size] += self.beta1 * exp_avg + (1.0 - self.beta1) * grad

        code(device, "onebit_momentum", momentum, 4 * grad.numel, worker.array, exp_avg.array, grad.array)
        of_slices = self._signs(flat, worker, ranks)
        arrived = [comm.all_to_all(one, kind=Kind.COMM) for one in of_slices]
        mean = device.alloc((server.numel,), grad.dtype, Kind.COMM)
        rows = [one.array.reshape(ranks, -1) for one in arrived]
        code(device, "decode", mean_of(self.codec), mean.numel * ranks, mean.array, *rows)
        device.kernel(mean.numel, device.backend.add, server.array, mean.array, server.array)
        gathered = [comm.all_gather(one, kind=Kind.COMM) for one in self._signs(flat, server, 1)]

        def put(xp: Any, grad: Array, bits: Array, scales: Array) -> None:
            own = bits.size // ranks * 8
            each = [xp.zeros(server.numel, grad.dtype) for _ in range(ranks)]
            for out, mine, scale in zip(each, bits.reshape(ranks, -1), scales, strict=True):
                assert out.size <= own
                self.codec.add(xp, out, mine, scale)
            grad[...] = xp.concatenate(each)[: grad.size]

        code(device, "decode", put, grad.numel, grad.array, *(one.array for one in gathered))

    def _signs(self, flat: Flat, values: Buffer, parts: int) -> list[Buffer]:
        """Encode values as signs, and leave the error in their place."""
        device = flat.device
        sent = buffers_for(device, self.codec.buffers(values.numel // parts, values.dtype), parts)
        rows = [one.array.reshape(parts, -1) for one in (values, *sent)]
        code(device, "encode", self.codec.encode, 3 * values.numel, *rows)
        return sent
