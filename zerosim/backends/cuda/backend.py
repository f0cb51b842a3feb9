"""The CUDA backend, on CuPy: the contract of `kernels.py`, and in which file each kernel is.

Kernels run in the calling thread's current stream and device; only `to_host`, and what `to_host_later`
returns, wait for it (and an upload, where a gigabyte of others is under way: see host.py). Nothing
here is imported unless backend "cuda" was asked for.
"""

from __future__ import annotations

import cupy as cp

from zerosim.backends.cuda import arrays as cuda_arrays
from zerosim.backends.cuda import attention as cuda_attention
from zerosim.backends.cuda import columns as cuda_columns
from zerosim.backends.cuda import flash as cuda_flash
from zerosim.backends.cuda import fused as cuda_fused
from zerosim.backends.cuda import llama as cuda_llama
from zerosim.backends.cuda import norm as cuda_norm
from zerosim.backends.cuda import ops as cuda_ops
from zerosim.backends.cuda import products as cuda_products
from zerosim.backends.cuda import tokens as cuda_tokens
from zerosim.backends.cuda import update as cuda_update
from zerosim.backends.cuda.host import Transfers
from zerosim.backends.cuda.nccl import Nccl
from zerosim.backends.cuda.stream import CudaStream


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

    empty = staticmethod(cuda_arrays.empty)
    fill = staticmethod(cuda_arrays.fill)
    copy = staticmethod(cuda_arrays.copy)

    add = staticmethod(cuda_ops.add)
    subtract = staticmethod(cuda_ops.subtract)
    multiply = staticmethod(cuda_ops.multiply)
    divide = staticmethod(cuda_ops.divide)
    exp = staticmethod(cuda_ops.exp)
    log = staticmethod(cuda_ops.log)
    sqrt = staticmethod(cuda_ops.sqrt)
    tanh = staticmethod(cuda_ops.tanh)
    sum_to = staticmethod(cuda_ops.sum_to)
    max_to = staticmethod(cuda_ops.max_to)
    mask_future = staticmethod(cuda_ops.mask_future)
    matmul = staticmethod(cuda_products.matmul)

    linear = staticmethod(cuda_products.linear)
    column_sum = staticmethod(cuda_columns.column_sum)
    layer_norm = staticmethod(cuda_norm.layer_norm)
    layer_norm_stats = staticmethod(cuda_norm.layer_norm_stats)
    layer_norm_backward = staticmethod(cuda_norm.layer_norm_backward)
    gelu = staticmethod(cuda_fused.gelu)
    gelu_backward = staticmethod(cuda_fused.gelu_backward)
    dropout_mask = staticmethod(cuda_fused.dropout_mask)
    dropout = staticmethod(cuda_fused.dropout)
    attention = staticmethod(cuda_attention.attention)
    attention_backward = staticmethod(cuda_attention.attention_backward)
    flash_attention = staticmethod(cuda_flash.flash_attention)
    flash_attention_backward = staticmethod(cuda_flash.flash_attention_backward)
    rms_norm = staticmethod(cuda_llama.rms_norm)
    rms_norm_stats = staticmethod(cuda_llama.rms_norm_stats)
    rms_norm_backward = staticmethod(cuda_llama.rms_norm_backward)
    rotary = staticmethod(cuda_llama.rotary)
    swiglu = staticmethod(cuda_llama.swiglu)
    swiglu_backward = staticmethod(cuda_llama.swiglu_backward)
    embedding = staticmethod(cuda_tokens.embedding)
    embedding_backward = staticmethod(cuda_tokens.embedding_backward)
    cross_entropy = staticmethod(cuda_tokens.cross_entropy)
    cross_entropy_backward = staticmethod(cuda_tokens.cross_entropy_backward)

    reduce = staticmethod(cuda_update.reduce)
    sum_squares = staticmethod(cuda_update.sum_squares)
    finite_probe = staticmethod(cuda_update.finite_probe)
    adam = staticmethod(cuda_update.adam)
    sgd = staticmethod(cuda_update.sgd)
