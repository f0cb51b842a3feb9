"""Exchanges that send codes of gradients. ZeRO itself has none of them.

    residual    the elements that were not sent before are added to the gradient first (error feedback)
    encode      into COMM buffers, a part for each rank's slice; stage 0: one part, the whole
    exchange    stages 1 to 3: all_to_all, each rank gets all ranks' parts of its slice. Stage 0: all_gather of all
    decode      the mean of the received parts, added in rank order, into the local slice

Residuals are a row of their own: each rank stores its whole residual, 4 Psi bytes, which no ZeRO stage divides.
Sources: arXiv 1809.07599 and 1901.09847 (error feedback); codecs: `codecs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from zerosim.backends.kernels import Array
from zerosim.comm.group import Work
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.work import VECTOR, KernelWork
from zerosim.dtypes import DType
from zerosim.parallel.compression.codecs import Codec, TopK, mean_of, most_of
from zerosim.parallel.exchange import Slices
from zerosim.parallel.gathers import AllGather
from zerosim.placement.partition import Whole
from zerosim.placement.rows import Row
from zerosim.tensor.flat import Flat
from zerosim.tensor.rng import generator


class InFlight(NamedTuple):
    """The buffers of one flat's codes, in flight."""

    works: Sequence[Work[Buffer]]

    def wait(self) -> list[list[Buffer]]:
        """Wait for the codes of the one flat."""
        return [[work.wait() for work in self.works]]


class Encoded(Slices):
    """Send every rank's gradient as a codec's buffers."""

    joins = False

    def __init__(self, gathers: AllGather, codec: Codec) -> None:
        super().__init__(gathers)
        self.codec = codec
        if codec.has_residual:
            self.states, self.keeps = {"residual": Row(Whole())}, {"residual": "rank"}
        self.kept: dict[tuple[str, str], Buffer] = {}  # by state and flat

    def place(self, flat: Flat, state: str) -> None:
        kept = flat.device.alloc((flat.padded_numel,), flat.grad_dtype, Kind.OPTIM, name=state)
        flat.device.kernel(0, flat.device.backend.fill, kept.array, 0.0)
        self.kept[state, flat.name] = kept

    def parts(self, flat: Flat) -> int:
        """Return how many parts a gradient is sent in: one for each rank's slice; stage 0 sends the whole as one."""
        return 1 if flat.held.rows["optim"].is_whole else self.group_of(flat).size

    def codec_now(self, flat: Flat) -> Codec:
        """Return the codec of this step."""
        return self.codec

    def launch_reduce(self, flats: Sequence[Flat], grads: list[Buffer]) -> Any:
        [flat], grad = flats, grads.pop()
        with flat.device.scope(unit=flat.spec.module):
            values = self.values(flat, grad)
            del grad
            return self.send(flat, values, self.codec_now(flat))

    launch_in_place = launch_reduce

    def values(self, flat: Flat, grad: Buffer) -> Buffer:
        """Return the values to encode: gradient plus residual, in the residual's memory."""
        residual = self.kept.get(("residual", flat.name))
        if residual is None:
            return grad
        flat.device.kernel(grad.numel, flat.device.backend.add, residual.array, grad.array, residual.array)
        return residual

    def send(self, flat: Flat, values: Buffer, codec: Codec) -> InFlight:
        """Encode and launch."""
        device, parts, comm = flat.device, self.parts(flat), self.group_of(flat)
        sent = buffers_for(device, codec.buffers(values.numel // parts, values.dtype), parts)
        rows = [one.array.reshape(parts, -1) for one in (values, *sent)]
        code(device, "encode", codec.encode, values.numel, *rows)
        launch = comm.launch_all_gather if parts == 1 else comm.launch_all_to_all
        return InFlight([launch(one, kind=Kind.COMM) for one in sent])

    def own_part(self, flat: Flat, reduced: Any) -> Buffer:
        return self.decoded(flat, reduced, flat.new_grad_shard())

    def own_window(self, flat: Flat, grad: Buffer, reduced: Any) -> Buffer:
        return self.decoded(flat, reduced, flat.own_window(grad))

    def decoded(self, flat: Flat, arrived: Sequence[Buffer], own: Buffer) -> Buffer:
        """Write the mean over ranks into `own`."""
        ranks = self.group_of(flat).size
        rows = [one.array.reshape(ranks, -1) for one in arrived]
        code(flat.device, "decode", mean_of(self.codec_now(flat)), own.numel * ranks, own.array, *rows)
        return own


class RandomK(Encoded):
    """ceil(ratio n) elements of each slice, the same ones on all ranks: a plain reduction adds them, and no places are
    sent. Elements that were not drawn are the residual."""

    def __init__(self, gathers: AllGather, ratio: float, seed: int) -> None:
        super().__init__(gathers, TopK(ratio))  # for its residual and its count
        self.ratio, self.seed = ratio, seed

    def places(self, flat: Flat, part: int) -> Any:
        """Return which elements of a part are sent in this step, in rising order; a host array."""
        numel = flat.padded_numel // self.parts(flat)
        draw = generator("random-k", self.seed, flat.device.where.step, flat.name, part)
        chosen = draw.choice(numel, most_of(self.ratio, numel), replace=False, shuffle=False)
        chosen.sort()
        return chosen

    def send(self, flat: Flat, values: Buffer, codec: Codec) -> Any:
        device, parts, comm = flat.device, self.parts(flat), self.group_of(flat)
        kept = most_of(self.ratio, values.numel // parts)
        sent = device.alloc((parts * kept,), values.dtype, Kind.COMM)

        def take(xp: Any, values: Array, sent: Array) -> None:
            for part, (row, out) in enumerate(zip(values, sent, strict=True)):
                at = xp.asarray(self.places(flat, part))
                out[...] = row[at]
                row[at] = 0

        code(device, "encode", take, 0, *(one.array.reshape(parts, -1) for one in (values, sent)))
        if parts == 1:
            return InFlight([comm.launch_all_reduce(sent)])
        return InFlight([comm.launch_reduce_scatter(sent, kind=Kind.COMM)])

    def decoded(self, flat: Flat, arrived: Sequence[Buffer], own: Buffer) -> Buffer:
        part = 0 if self.parts(flat) == 1 else self.group_of(flat).rank

        def put(xp: Any, out: Array, mean: Array) -> None:
            out[...] = 0
            out[xp.asarray(self.places(flat, part))] = mean

        code(flat.device, "decode", put, 0, own.array, arrived[0].array)
        return own


def buffers_for(device: Device, arrays: Sequence[tuple[int, DType]], parts: int = 1) -> list[Buffer]:
    """Return buffers for so many parts of codes, each of which has these arrays."""
    return [device.alloc((parts * numel,), dtype, Kind.COMM) for numel, dtype in arrays]


def code(device: Device, name: str, rule: Any, flops: int, *arrays: Array) -> None:
    """Run a codec as one kernel, which reads and writes all of its arrays once."""
    nbytes = sum(int(array.nbytes) for array in arrays)
    device.kernels((KernelWork(name, VECTOR, flops, nbytes, nbytes),), device.backend.coded, rule, *arrays)
