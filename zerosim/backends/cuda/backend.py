"""The CUDA backend, on CuPy: the contract of `kernels.py`, and in which file each kernel is.

Kernels run in the calling thread's current stream and device; only `to_host`, and what `to_host_later`
returns, wait for it (and an upload, where a gigabyte of others is under way: see host.py). Nothing
here is imported unless backend "cuda" was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cupy as cp

from zerosim.backends.cuda import (
    arrays,
    attention,
    flash,
    fused,
    llama,
    norm,
    ops,
    products,
    quantize,
    rules,
    tokens,
    update,
)
from zerosim.backends.cuda.host import Transfers
from zerosim.backends.cuda.nccl import Nccl
from zerosim.backends.cuda.stream import CudaStream
from zerosim.backends.kernels import Array, Native, made_of


@made_of(arrays, ops, products, norm, fused, attention, flash, llama, tokens, update, quantize, rules)
class CudaBackend:
    """Implements `Backend` on NVIDIA GPUs. One instance serves every rank: it holds pinned blocks
    under way and NCCL's communicators, nothing of a run."""

    name = "cuda"
    empty = staticmethod(arrays.empty)

    def __init__(self) -> None:
        self._nccl, self._transfers = Nccl(), Transfers()

    def open_stream(self, rank: int) -> CudaStream:
        """Ranks are dealt out to the visible GPUs in turn."""
        return CudaStream(rank % cp.cuda.runtime.getDeviceCount())

    def native_collective(self, streams: Sequence[Any], calls: Sequence[Native]) -> None:
        self._nccl.perform(streams, calls)

    def from_host(self, values: Any, out: Array) -> None:
        self._transfers.from_host(values, out)

    def to_host(self, array: Array) -> Any:
        return self._transfers.to_host(array)

    def to_host_later(self, array: Array) -> Callable[[], Any]:
        return self._transfers.to_host_later(array)
