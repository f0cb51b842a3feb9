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
from zerosim.device.device import Buffer, Device, Kind
from zerosim.dtypes import DType, fp16, fp32, uint8
from zerosim.parallel.compression.encoded import code
from zerosim.parallel.compression.groups import decode, decoded_sum, encode, grad_groups, weight_groups
from zerosim.parallel.exchange import Slices
from zerosim.parallel.gathers import NODE, NODES, AllGather, Arriving
from zerosim.tensor.flat import Flat

WEIGHT_BITS, GRAD_BITS = 8, 4


class QuantizedGather(AllGather):
    """qwZ."""

    in_place = False

    def gather(self, flat: Flat, comm: Comm, shard: Buffer) -> Buffer:
        return self.launch(flat, comm, shard).wait()

    def launch(self, flat: Flat, comm: Comm, shard: Buffer) -> Arriving:
        device, values = flat.device, as_fp16(shard)
        codes = device.alloc((values.numel,), uint8, Kind.COMM)
        scales = device.alloc((weight_groups(values.numel),), fp32, Kind.COMM)

        def rule(xp: Any, values: Array, codes: Array, scales: Array) -> None:
            encode(xp, WEIGHT_BITS, values, codes, scales)

        code(device, "quantize", rule, 3 * values.numel, values.array, codes.array, scales.array)
        works = [comm.launch_all_gather(one, kind=Kind.COMM) for one in (codes, scales)]
        return Dequantized(works, flat.dtype)


class Dequantized(NamedTuple):
    """Codes of weights in flight."""

    works: Sequence[Work[Buffer]]
    dtype: DType

    def wait(self) -> Buffer:
        codes, scales = (work.wait() for work in self.works)
        device = codes.device
        full = device.alloc((codes.numel,), fp16, Kind.UNSHARDED_PARAM)

        def rule(xp: Any, full: Array, codes: Array, scales: Array) -> None:
            full[...] = decode(xp, WEIGHT_BITS, codes, scales)

        code(device, "dequantize", rule, codes.numel, full.array, codes.array, scales.array)
        return cast(full, self.dtype, Kind.UNSHARDED_PARAM)


class QuantizedReduction(Slices):
    """qgZ. Gradients of one-dimensional tensors only are reduced exactly."""

    joins = False

    def groups_of(self, flat: Flat) -> int:
        """Return into how many groups a gradient is cut; 0: it is reduced exactly."""
        shapes = tuple(weight.shape for weight in flat.spec.weights)
        return grad_groups(shapes, flat.padded_numel, self.group_of(flat).size)

    def launch_reduce(self, flats: Sequence[Flat], grads: list[Buffer]) -> Any:
        [flat] = flats
        if not (groups := self.groups_of(flat)):
            return super().launch_reduce(flats, grads)
        node, nodes = self.groups(NODE), self.groups(NODES)
        with flat.device.scope(unit=flat.spec.module):
            values = as_fp16(grads.pop())

            def rule(xp: Any, values: Array, codes: Array, scales: Array) -> None:
                by_place = values.reshape(nodes.size, node.size, -1).transpose(1, 0, 2)
                encode(xp, GRAD_BITS, by_place, codes, scales)

            sent = _codes(flat.device, values.numel, groups)
            code(flat.device, "quantize", rule, 3 * values.numel, values.array, *(one.array for one in sent))
            return FirstHop([node.launch_all_to_all(one, kind=Kind.COMM) for one in sent], node, nodes, flat)

    def own_part(self, flat: Flat, reduced: Any) -> Buffer:
        if isinstance(reduced, Buffer):
            return reduced
        ranks, nodes = self.group_of(flat).size, self.groups(NODES).size
        mean = flat.device.alloc((flat.own.size,), fp16, Kind.GRAD, padding=flat.own_padding)

        def rule(xp: Any, mean: Array, codes: Array, scales: Array) -> None:
            mean[...] = decoded_sum(xp, GRAD_BITS, codes, scales) / xp.float16(ranks)

        rows = [one.array.reshape(nodes, -1) for one in reduced]
        code(flat.device, "dequantize", rule, nodes * mean.numel, mean.array, *rows)
        del reduced, rows
        return cast(mean, flat.grad_dtype, Kind.GRAD, padding=flat.own_padding)


class FirstHop(NamedTuple):
    """Codes of one flat's gradient in flight within the node."""

    works: Sequence[Work[Buffer]]
    node: Comm
    nodes: Comm
    flat: Flat

    def wait(self) -> list[list[Buffer]]:
        """Run the second hop, and return the one flat's reduced gradient."""
        device = self.flat.device
        with device.scope(unit=self.flat.spec.module):
            arrived = [work.wait() for work in self.works]
            rows = [one.array.reshape(self.node.size, -1) for one in arrived]
            numel, groups = 2 * arrived[0].numel // self.node.size, arrived[1].numel // self.node.size
            sent = _codes(device, numel, groups)

            def rule(xp: Any, codes: Array, scales: Array, out: Array, out_scales: Array) -> None:
                encode(xp, GRAD_BITS, decoded_sum(xp, GRAD_BITS, codes, scales), out, out_scales)

            code(device, "reduce", rule, (self.node.size + 3) * numel, *rows, *(one.array for one in sent))
            del arrived, rows
            return [[self.nodes.all_to_all(one, kind=Kind.COMM) for one in sent]]


def _codes(device: Device, numel: int, groups: int) -> list[Buffer]:
    """Buffers for int4 codes, and for a scale of each group."""
    return [device.alloc((numel // 2,), uint8, Kind.COMM), device.alloc((groups,), fp32, Kind.COMM)]


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
