"""Checks of a collective's arguments before it joins. Each InputError names rank, call and numbers.

Here a rank judges only its own arguments. Where ranks meet, the transport checks that they agree (`threads.py`,
`mpi/`).
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.backends.kernels import Array
from zerosim.device.device import Buffer, Device
from zerosim.dtypes import DType
from zerosim.errors import InputError

REDUCTIONS = ("avg", "sum", "max")


def buffers_of(device: Device, call: str, value: Buffer | list[Buffer]) -> list[Buffer]:
    """Return one or several buffers as a list, after checking that they are this rank's and of one dtype."""
    buffers = [value] if isinstance(value, Buffer) else list(value)
    if not buffers:
        raise InputError(f"rank {device.rank}: {call} of an empty list: pass at least one buffer")
    for buffer in buffers:
        if buffer.device is not device:
            raise InputError(
                f"rank {device.rank}: {call} of a buffer that lies on rank {buffer.device.rank}'s device: "
                "a rank passes its own buffers"
            )
        if buffer.dtype != buffers[0].dtype:
            raise InputError(
                f"rank {device.rank}: {call} of {buffers[0].dtype} and {buffer.dtype} in one call: "
                "make one call per number format"
            )
    return buffers


def reduction(device: Device, call: str, op: str, dtype: DType) -> None:
    if op not in REDUCTIONS:
        raise InputError(f"rank {device.rank}: {call} with unknown op {op!r}: expected one of {', '.join(REDUCTIONS)}")
    if op == "avg" and not dtype.floating:
        raise InputError(f"rank {device.rank}: {call} avg of {dtype}, which cannot hold a mean: use op='sum'")


def member(device: Device, call: str, role: str, index: int, size: int) -> None:
    if not 0 <= index < size:
        raise InputError(
            f"rank {device.rank}: {call} with {role} {index}: expected an index in the group, 0 to {size - 1}"
        )


def slice_numel(device: Device, call: str, full: Buffer, size: int) -> int:
    """Return c of a flat buffer of N*c elements."""
    if len(full.shape) != 1 or full.numel % size:
        raise InputError(
            f"rank {device.rank}: {call} of {full.dtype} {full.shape} over {size} ranks: expected one dimension "
            f"and a multiple of {size} elements; pad it to {-(-full.numel // size) * size}"
        )
    return full.numel // size


def shape(device: Device, call: str, name: str, buffer: Buffer, expected: tuple[int, ...]) -> None:
    if buffer.shape != expected:
        raise InputError(f"rank {device.rank}: {call}: {name} has shape {buffer.shape}, expected {expected}")


def outputs(device: Device, call: str, outs: list[Buffer], dtype: DType, expected: Sequence[int]) -> None:
    """Check that `outs` are flat, of `dtype` and of the expected numbers of elements."""
    if len(outs) != len(expected):
        raise InputError(f"rank {device.rank}: {call}: {len(outs)} buffers in out, expected {len(expected)}")
    for out, numel in zip(outs, expected, strict=True):
        shape(device, call, "out", out, (numel,))
        if out.dtype != dtype:
            raise InputError(f"rank {device.rank}: {call}: out is {out.dtype}, expected {dtype}")


def flat(device: Device, call: str, buffer: Buffer) -> Array:
    """Return the buffer's array in one dimension, without a copy."""
    array = buffer.array
    if len(buffer.shape) == 1:
        return array
    flags = getattr(array, "flags", None)
    if flags is not None and not flags.c_contiguous:
        raise InputError(
            f"rank {device.rank}: {call} of a strided window {buffer.shape}: expected contiguous memory; copy it first"
        )
    return array.reshape(-1)


def in_place(device: Device, call: str, part: Buffer, full: Buffer, rank: int) -> bool:
    """Return whether `part` is this rank's own slice of `full` itself (in place), or separate memory."""
    if part.storage is not full.storage or not part.numel:
        return False
    own = full.array[rank * part.numel : (rank + 1) * part.numel]
    if _address(part.array) == _address(own):
        return True
    if _overlap(part, full):
        raise InputError(
            f"rank {device.rank}: {call}: the shard overlaps the whole buffer but is not its slice number {rank}: "
            f"in place, pass the window [{rank * part.numel}:{(rank + 1) * part.numel}]"
        )
    return False


def apart(device: Device, call: str, out: Buffer, buffer: Buffer) -> None:
    """Check that `out` shares no memory with `buffer`."""
    if out is buffer or _overlap(out, buffer):
        raise InputError(
            f"rank {device.rank}: {call}: out overlaps the buffer, which others still read while out is filled: "
            "pass memory of its own, or no out"
        )


def split_sizes(
    device: Device, call: str, rank: int, size: int, buffer: Buffer, inputs: Sequence[int], outputs: Sequence[int]
) -> None:
    """Check that `inputs` add up to the buffer, and that both lists have one size per member and agree on the local
    part."""
    for name, sizes in (("input_split_sizes", inputs), ("output_split_sizes", outputs)):
        if len(sizes) != size or any(part < 0 for part in sizes):
            raise InputError(
                f"rank {device.rank}: {call}: {name} {list(sizes)}: expected {size} numbers of elements, "
                "one for each rank of the group and none below 0"
            )
    if buffer.shape != (sum(inputs),):
        raise InputError(
            f"rank {device.rank}: {call}: input_split_sizes {list(inputs)} add up to {sum(inputs)}, and the buffer has "
            f"shape {buffer.shape}: expected ({sum(inputs)},)"
        )
    if inputs[rank] != outputs[rank]:
        raise InputError(
            f"rank {device.rank}: {call}: the rank sends itself {inputs[rank]} elements and expects {outputs[rank]}: "
            f"input_split_sizes[{rank}] and output_split_sizes[{rank}] must be equal"
        )


def _overlap(a: Buffer, b: Buffer) -> bool:
    """Return whether two buffers share memory; False for arrays without memory."""
    start, other = _address(a.array), _address(b.array)
    if a.storage is not b.storage or start is None or other is None:
        return False
    return start < other + b.nbytes and other < start + a.nbytes


def _address(array: Array) -> int | None:
    """Return the first element's address, as NumPy or CuPy gives it; None for arrays without memory."""
    found = getattr(array, "__array_interface__", None)
    if found is not None:
        return int(found["data"][0])
    memory = getattr(array, "data", None)
    return None if memory is None else int(memory.ptr)
