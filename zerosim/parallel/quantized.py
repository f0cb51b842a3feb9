"""qwZ and qgZ (ZeRO++, arXiv 2306.10209, 3.1 and 3.3): weights are gathered, and gradients are reduced, as codes.

                         exact                     codes, before their scales (4 bytes a group)
    qwZ, each gather     2 Psi (N-1)/N             Psi (N-1)/N
    qgZ, within a node   2 Psi (N-1)/N             Psi/2 (d-1)/d
         across nodes                              Psi/(2d) (n-1)/n

Bytes that each of N = n d ranks sends, in half types, with d ranks in each of n nodes.

qwZ  quantize    the own shard; all_gather its codes and scales; dequantize all of them, the own too
qgZ  quantize    the whole gradient in int4, slices put in order by their rank's place within a node
     first hop   all_to_all within the node: each rank gets all its node has of n slices, those of its place
     reduce      dequantize, add in fp16 in rank order, quantize in int4 again
     second hop  all_to_all across nodes: each rank gets its own slice from every node
     reduce      dequantize, add, divide by N

Codes stand for fp16 values: other formats are cast to fp16 and back. Groups and codes: `compression/groups.py`. When a
reduction is launched, only its first hop starts; waiting for the reduction runs the second. DeepSpeed (03aecee) divides
by the number of nodes only, which makes gradients d times as large. Adam does not notice; gradient clipping does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from zerosim.backends.kernels import Array
from zerosim.comm.collectives import Comm
from zerosim.comm.group import Work
from zerosim.device.device import Buffer, Kind
from zerosim.dtypes import DType, fp16
from zerosim.parallel.compression.codecs import added
from zerosim.parallel.compression.encoded import buffers_for, code
from zerosim.parallel.compression.groups import Groups, grad_groups, weight_groups
from zerosim.parallel.exchange import Slices
from zerosim.parallel.gathers import NODE, NODES, AllGather, Arriving
from zerosim.placement.formats import blocks
from zerosim.tensor.flat import Flat

WEIGHT_BITS, GRAD_BITS = 8, 4


class QuantizedGather(AllGather):
    """qwZ."""

    in_place = False

    def gather(self, flat: Flat, comm: Comm, shard: Buffer) -> Buffer:
        return self.launch(flat, comm, shard).wait()

    def launch(self, flat: Flat, comm: Comm, shard: Buffer) -> Arriving:
        device, values = flat.device, as_fp16(shard)
        codec = Groups(blocks(WEIGHT_BITS, values.numel // weight_groups(values.numel)))
        sent = buffers_for(device, codec.format.arrays(values.numel))
        arrays = (one.array for one in (values, *sent))
        code(device, "quantize", codec.encode, 3 * values.numel, *arrays)
        return Dequantized([comm.launch_all_gather(one, kind=Kind.COMM) for one in sent], codec, flat.dtype)


class Dequantized(NamedTuple):
    """Codes of weights in flight."""

    works: Sequence[Work[Buffer]]
    codec: Groups
    dtype: DType

    def wait(self) -> Buffer:
        codes, scales = (work.wait() for work in self.works)
        device = codes.device
        full = device.alloc((codes.numel,), fp16, Kind.UNSHARDED_PARAM)

        def rule(xp: Any, full: Array, codes: Array, scales: Array) -> None:
            full[...] = self.codec.decode(xp, codes, scales)

        code(device, "dequantize", rule, codes.numel, full.array, codes.array, scales.array)
        return cast(full, self.dtype, Kind.UNSHARDED_PARAM)


class QuantizedReduction(Slices):
    """qgZ. Gradients of one-dimensional tensors only are reduced exactly."""

    joins = False

    def codec_of(self, flat: Flat) -> Groups | None:
        """Return how a gradient is cut into groups; None: it is reduced exactly."""
        shapes = tuple(weight.shape for weight in flat.spec.weights)
        groups = grad_groups(shapes, flat.padded_numel, self.group_of(flat).size)
        return Groups(blocks(GRAD_BITS, flat.padded_numel // groups)) if groups else None

    def launch_reduce(self, flats: Sequence[Flat], grads: list[Buffer]) -> Any:
        [flat] = flats
        if (codec := self.codec_of(flat)) is None:
            return super().launch_reduce(flats, grads)
        node, nodes = self.groups(NODE), self.groups(NODES)
        with flat.device.scope(unit=flat.spec.module):
            values = as_fp16(grads.pop())

            def rule(xp: Any, values: Array, codes: Array, scales: Array) -> None:
                codec.encode(xp, values.reshape(nodes.size, node.size, -1).transpose(1, 0, 2), codes, scales)

            sent = buffers_for(flat.device, codec.format.arrays(values.numel))
            code(flat.device, "quantize", rule, 3 * values.numel, values.array, *(one.array for one in sent))
            return FirstHop([node.launch_all_to_all(one, kind=Kind.COMM) for one in sent], node, nodes, flat, codec)

    def own_part(self, flat: Flat, reduced: Any) -> Buffer:
        if isinstance(reduced, Buffer):
            return reduced
        codec, arrived = reduced
        ranks, nodes = self.group_of(flat).size, self.groups(NODES).size
        mean = flat.device.alloc((flat.own.size,), fp16, Kind.GRAD, padding=flat.own_padding)

        def rule(xp: Any, mean: Array, codes: Array, scales: Array) -> None:
            mean[...] = added(xp, codec, xp.zeros_like(mean), codes, scales) / xp.float16(ranks)

        rows = [one.array.reshape(nodes, -1) for one in arrived]
        code(flat.device, "dequantize", rule, nodes * mean.numel, mean.array, *rows)
        del reduced, arrived, rows
        return cast(mean, flat.grad_dtype, Kind.GRAD, padding=flat.own_padding)


class FirstHop(NamedTuple):
    """Codes of one flat's gradient in flight within the node."""

    works: Sequence[Work[Buffer]]
    node: Comm
    nodes: Comm
    flat: Flat
    codec: Groups

    def wait(self) -> list[tuple[Groups, list[Buffer]]]:
        """Run the second hop, and return the one flat's codec and the codes of its gradient, from every node."""
        device = self.flat.device
        with device.scope(unit=self.flat.spec.module):
            arrived = [work.wait() for work in self.works]
            rows = [one.array.reshape(self.node.size, -1) for one in arrived]
            numel, codec = self.flat.padded_numel // self.node.size, self.codec
            sent = buffers_for(device, codec.format.arrays(numel))

            def rule(xp: Any, codes: Array, scales: Array, *out: Array) -> None:
                codec.encode(xp, added(xp, codec, xp.zeros(numel, xp.float16), codes, scales), *out)

            code(device, "reduce", rule, (self.node.size + 3) * numel, *rows, *(one.array for one in sent))
            del arrived, rows
            return [(codec, [self.nodes.all_to_all(one, kind=Kind.COMM) for one in sent])]


def as_fp16(buffer: Buffer) -> Buffer:
    """Return the buffer's values in fp16: the buffer itself, or a new one."""
    return cast(buffer, fp16, Kind.COMM)


def cast(buffer: Buffer, dtype: DType, kind: Kind, *, padding: int = 0) -> Buffer:
    """Return the values in another format: a new buffer, or the buffer itself if it has that format."""
    if buffer.dtype == dtype:
        return buffer
    device = buffer.device
    out = device.alloc((buffer.numel,), dtype, kind, padding=padding)
    device.kernel(0, device.backend.copy, buffer.array, out.array)
    return out
