"""The CUDA backend, on CuPy: the protocol of `kernels.py`, and the file of each kernel.

Kernels run in the calling thread's current stream and device. Only `to_host` and the function that `to_host_later`
returns wait for the stream (and an upload, if a gigabyte of others is in flight: see host.py). Only
backend "cuda" imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cupy as cp

from zerosim.backends.cuda import (
    activations,
    arrays,
    attention,
    batched,
    blocks,
    coded,
    experts,
    flash,
    fused,
    gptq,
    latent,
    llama,
    losses,
    nf4,
    norm,
    ops,
    products,
    quantize,
    rotary,
    rules,
    tokens,
    update,
)
from zerosim.backends.cuda.host import Transfers
from zerosim.backends.cuda.nccl import Nccl
from zerosim.backends.cuda.stream import CudaStream
from zerosim.backends.kernels import Array, Native, made_of

KERNELS = (
    *(arrays, ops, products, norm, fused, activations, attention, blocks, flash, llama, latent, rotary),
    *(experts, losses, tokens, update, quantize, nf4, gptq, coded, rules),
)


@made_of(*KERNELS)
class CudaBackend:
    """Implements `Backend` on NVIDIA GPUs. One instance serves every rank. It holds pinned blocks
    in flight and NCCL's communicators, and no state of a run."""

    name = "cuda"
    empty = staticmethod(arrays.empty)

    def __init__(self) -> None:
        self._nccl, self._transfers = Nccl(), Transfers()

    def open_stream(self, rank: int) -> CudaStream:
        """Open rank r's stream on visible GPU r mod G."""
        return CudaStream(rank % cp.cuda.runtime.getDeviceCount())

    def native_collective(self, streams: Sequence[Any], calls: Sequence[Native]) -> None:
        self._nccl.perform(streams, calls)

    def from_host(self, values: Any, out: Array) -> None:
        self._transfers.from_host(values, out)

    def to_host(self, array: Array) -> Any:
        return self._transfers.to_host(array)

    def to_host_later(self, array: Array) -> Callable[[], Any]:
        return self._transfers.to_host_later(array)


class BatchedCudaBackend(CudaBackend):
    """Implements `Backend` with flash attention by strided-batched products, of `--batched-flash`."""

    flash_attention = staticmethod(batched.flash_attention)
    flash_attention_backward = staticmethod(batched.flash_attention_backward)
    attention_block = staticmethod(batched.attention_block)
    attention_block_backward = staticmethod(batched.attention_block_backward)
