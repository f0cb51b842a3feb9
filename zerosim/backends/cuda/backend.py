"""The CUDA backend, on CuPy: the contract of `kernels.py`, and in which file each kernel is.

Kernels run in the calling thread's current stream and device; only `to_host`, and what `to_host_later`
returns, wait for it (and an upload, where a gigabyte of others is under way: see host.py). Nothing
here is imported unless backend "cuda" was asked for.
"""

from __future__ import annotations

import cupy as cp

from zerosim.backends.cuda import arrays, attention, flash, fused, llama, norm, ops, products, tokens, update
from zerosim.backends.cuda.host import Transfers
from zerosim.backends.cuda.nccl import Nccl
from zerosim.backends.cuda.stream import CudaStream

# fmt: off
KERNELS = (
    arrays.empty, arrays.fill, arrays.copy,
    ops.add, ops.subtract, ops.multiply, ops.divide, ops.exp, ops.log, ops.sqrt, ops.tanh,
    ops.sum_to, ops.max_to, ops.mask_future, products.matmul,
    products.linear, norm.column_sum, norm.layer_norm, norm.layer_norm_stats, norm.layer_norm_backward,
    fused.gelu, fused.gelu_backward, fused.dropout_mask, fused.dropout,
    attention.attention, attention.attention_backward, flash.flash_attention, flash.flash_attention_backward,
    llama.rms_norm, llama.rms_norm_stats, llama.rms_norm_backward,
    llama.rotary, llama.swiglu, llama.swiglu_backward,
    tokens.embedding, tokens.embedding_backward,
    tokens.cross_entropy, tokens.cross_entropy_shares, tokens.cross_entropy_backward,
    update.reduce, update.sum_squares, update.finite_probe, update.adam, update.sgd,
)
# fmt: on


class CudaBackend:
    """Implements `Backend` on NVIDIA GPUs. One instance serves every rank: it holds pinned blocks
    under way and NCCL's communicators, nothing of a run."""

    name = "cuda"

    def __init__(self) -> None:
        self.native_collective = Nccl().perform
        transfers = Transfers()
        self.from_host = transfers.from_host
        self.to_host = transfers.to_host
        self.to_host_later = transfers.to_host_later

    def open_stream(self, rank: int) -> CudaStream:
        """Ranks are dealt out to the visible GPUs in turn."""
        return CudaStream(rank % cp.cuda.runtime.getDeviceCount())


for kernel in KERNELS:
    setattr(CudaBackend, kernel.__name__, staticmethod(kernel))
