"""The CUDA backend, on CuPy: the contract of `kernels.py`, and in which file each kernel is.

Kernels run in the calling thread's current stream and device; only `to_host`, and what `to_host_later`
returns, wait for it (and an upload, where a gigabyte of others is under way: see host.py). Nothing
here is imported unless backend "cuda" was asked for.
"""

from __future__ import annotations

import cupy as cp

from zerosim.backends.cuda import arrays, flash, fused, llama, norm, ops, products, quantize, rules, tokens, update
from zerosim.backends.cuda import attention as heads
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

    empty = staticmethod(arrays.empty)
    fill = staticmethod(arrays.fill)
    copy = staticmethod(arrays.copy)
    add = staticmethod(ops.add)
    subtract = staticmethod(ops.subtract)
    multiply = staticmethod(ops.multiply)
    divide = staticmethod(ops.divide)
    exp = staticmethod(ops.exp)
    log = staticmethod(ops.log)
    sqrt = staticmethod(ops.sqrt)
    tanh = staticmethod(ops.tanh)
    sum_to = staticmethod(ops.sum_to)
    max_to = staticmethod(ops.max_to)
    mask_future = staticmethod(ops.mask_future)
    matmul = staticmethod(products.matmul)
    linear = staticmethod(products.linear)
    column_sum = staticmethod(norm.column_sum)
    layer_norm = staticmethod(norm.layer_norm)
    layer_norm_stats = staticmethod(norm.layer_norm_stats)
    layer_norm_backward = staticmethod(norm.layer_norm_backward)
    gelu = staticmethod(fused.gelu)
    gelu_backward = staticmethod(fused.gelu_backward)
    dropout_mask = staticmethod(fused.dropout_mask)
    dropout = staticmethod(fused.dropout)
    attention = staticmethod(heads.attention)
    attention_backward = staticmethod(heads.attention_backward)
    flash_attention = staticmethod(flash.flash_attention)
    flash_attention_backward = staticmethod(flash.flash_attention_backward)
    rms_norm = staticmethod(llama.rms_norm)
    rms_norm_stats = staticmethod(llama.rms_norm_stats)
    rms_norm_backward = staticmethod(llama.rms_norm_backward)
    rotary = staticmethod(llama.rotary)
    swiglu = staticmethod(llama.swiglu)
    swiglu_backward = staticmethod(llama.swiglu_backward)
    embedding = staticmethod(tokens.embedding)
    embedding_backward = staticmethod(tokens.embedding_backward)
    cross_entropy = staticmethod(tokens.cross_entropy)
    cross_entropy_shares = staticmethod(tokens.cross_entropy_shares)
    cross_entropy_backward = staticmethod(tokens.cross_entropy_backward)
    sample_labels = staticmethod(tokens.sample_labels)
    reduce = staticmethod(update.reduce)
    sum_squares = staticmethod(update.sum_squares)
    finite_probe = staticmethod(update.finite_probe)
    adam = staticmethod(update.adam)
    adam8bit = staticmethod(quantize.adam8bit)
    elementwise = staticmethod(rules.elementwise)
