"""NCCL's collectives for ranks of one process that each have a GPU of their own.

The last rank to join a round calls NCCL for all ranks, inside one group (groupStart, groupEnd). Otherwise the
first call would wait for the others for ever. Each rank's call runs in its own stream.

avg is NCCL's sum, divided by N afterwards: one rounding of the quotient, as in the other algorithms. NCCL's own average
(ncclAvg, since 2.10) multiplies every part by 1/N, rounded to the format, before it adds. Unless N is a power of two,
the bits differ. The price of the sum: in fp16 it can overflow where the average would not.

Source: NCCL User Guide, "Group Calls" and "Point-to-point communication" (all_to_all); nccl.h for the numbers of types
and operations; enqueue.cc (hostToDevRedOp) for ncclAvg.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from zerosim.backends.cuda.ops import divide
from zerosim.backends.cuda.stream import CudaStream
from zerosim.backends.kernels import Array, Native
from zerosim.backends.numpy.cast import BFLOAT16
from zerosim.errors import InputError

TYPES: Mapping[np.dtype[Any], int] = MappingProxyType(
    {
        np.dtype(np.uint8): 1,
        np.dtype(np.int32): 2,
        np.dtype(np.int64): 4,
        np.dtype(np.float16): 6,
        np.dtype(np.float32): 7,
        np.dtype(np.float64): 8,
        BFLOAT16: 9,
    }
)
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "all_gather": "allGather",
        "reduce_scatter": "reduceScatter",
        "all_reduce": "allReduce",
        "all_to_all": "send",
        "broadcast": "broadcast",
        "reduce": "reduce",
    }
)
"""CuPy's methods, by verb. An all_to_all is grouped calls of send and recv."""
SUM, MAX = 0, 2
REDUCTIONS: Mapping[str, int] = MappingProxyType({"sum": SUM, "avg": SUM, "max": MAX})


class Nccl:
    """The communicators of one run, one list per set of GPUs, created on first use."""

    def __init__(self) -> None:
        self._communicators: dict[tuple[int, ...], list[Any]] = {}

    def perform(self, streams: Sequence[CudaStream], calls: Sequence[Native]) -> None:
        """Queue `inputs[i]` to `outputs[i]` of every member's call; an all_to_all is queued piece by piece.

        Raises: InputError where two share a GPU, and for a verb that NCCL does not have.
        """
        from cupy.cuda import nccl

        op = calls[0].op
        if op not in NAMES:
            raise InputError(f"collective native: NCCL has no {op!r}: expected one of {', '.join(NAMES)}")
        communicators = self._of(tuple(stream.gpu for stream in streams))
        begin = _send_and_receive if op == "all_to_all" else _begin
        for i in range(len(calls[0].inputs)):
            nccl.groupStart()
            for stream, communicator, call in zip(streams, communicators, calls, strict=True):
                with stream.use():
                    begin(communicator, call, call.inputs[i], call.outputs[i], stream.cupy_stream.ptr)
            nccl.groupEnd()
        for member, (stream, call) in enumerate(zip(streams, calls, strict=True)):
            if call.reduction != "avg" or (op == "reduce" and member != call.root):
                continue
            with stream.use():
                for target in call.outputs:
                    divide(target, float(len(streams)), target)

    def _of(self, gpus: tuple[int, ...]) -> list[Any]:
        if len(set(gpus)) < len(gpus):
            raise InputError(
                f"collective native: {len(gpus)} ranks share {len(set(gpus))} GPU(s), but NCCL needs one GPU for "
                "each rank; choose "
                f"--collective direct, or --ranks {len(set(gpus))}"
            )
        if gpus not in self._communicators:
            from cupy.cuda import nccl

            self._communicators[gpus] = nccl.NcclCommunicator.initAll(list(gpus))
        return self._communicators[gpus]


def _begin(communicator: Any, call: Native, source: Array, target: Array, stream: int) -> None:
    """Queue one member's call of one collective. Counts are in elements: of a rank's slice, if one side has N
    slices."""
    send, receive, dtype = source.data.ptr, target.data.ptr, TYPES[source.dtype]
    words = [*([REDUCTIONS[call.reduction]] if call.reduction else []), *([call.root] if call.root >= 0 else [])]
    getattr(communicator, NAMES[call.op])(send, receive, min(source.size, target.size), dtype, *words, stream)


def _send_and_receive(communicator: Any, call: Native, source: Array, target: Array, stream: int) -> None:
    """Send and receive one member's parts of an all_to_all, within a group of calls. Empty parts are not sent."""
    dtype, itemsize = TYPES[source.dtype], source.dtype.itemsize
    sent, received = call.splits
    for post, array, sizes in ((communicator.send, source, sent), (communicator.recv, target, received)):
        start = array.data.ptr
        for peer, size in enumerate(sizes):
            if size:
                post(start, size, dtype, peer, stream)
            start += size * itemsize
