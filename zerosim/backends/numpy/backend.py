"""The NumPy backend: the contract of `kernels.py`, and in which file each kernel is.

Every kernel runs with floating-point warnings off: inf and nan are results like others here, as they
are on a GPU. What looks for them (a loss scaler, a norm) does so in the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import numpy as np

from zerosim.backends.numpy import attention as heads
from zerosim.backends.numpy import flash, fused, llama, ops, tokens, update
from zerosim.backends.numpy.memory import keep_freed_memory
from zerosim.errors import InputError

P = ParamSpec("P")


def _kernel(run: Callable[P, None]) -> staticmethod[P, None]:
    """`run` as a method of a stateless backend, with warnings off for as long as it runs."""
    return staticmethod(np.errstate(all="ignore")(run))


class NumpyBackend:
    """Implements `Backend` on the CPU; bfloat16 arrays are those of ml_dtypes."""

    name = "numpy"
    empty = staticmethod(ops.empty)
    to_host = staticmethod(ops.to_host)
    to_host_later = staticmethod(ops.to_host_later)

    def __init__(self) -> None:
        keep_freed_memory()

    def open_stream(self, rank: int) -> None:
        """None: kernels run when they are called."""

    def native_collective(self, *args: object) -> None:
        """Raises: InputError, always."""
        raise InputError("collective native: NumPy on threads has none; choose direct or ring, or --world mpi")

    from_host = _kernel(ops.from_host)
    fill = _kernel(ops.fill)
    copy = _kernel(ops.copy)
    add = _kernel(ops.add)
    subtract = _kernel(ops.subtract)
    multiply = _kernel(ops.multiply)
    divide = _kernel(ops.divide)
    exp = _kernel(ops.exp)
    log = _kernel(ops.log)
    sqrt = _kernel(ops.sqrt)
    tanh = _kernel(ops.tanh)
    sum_to = _kernel(ops.sum_to)
    max_to = _kernel(ops.max_to)
    mask_future = _kernel(ops.mask_future)
    matmul = _kernel(ops.matmul)
    linear = _kernel(fused.linear)
    column_sum = _kernel(fused.column_sum)
    layer_norm = _kernel(fused.layer_norm)
    layer_norm_stats = _kernel(fused.layer_norm_stats)
    layer_norm_backward = _kernel(fused.layer_norm_backward)
    gelu = _kernel(fused.gelu)
    gelu_backward = _kernel(fused.gelu_backward)
    dropout_mask = _kernel(fused.dropout_mask)
    dropout = _kernel(fused.dropout)
    attention = _kernel(heads.attention)
    attention_backward = _kernel(heads.attention_backward)
    flash_attention = _kernel(flash.flash_attention)
    flash_attention_backward = _kernel(flash.flash_attention_backward)
    rms_norm = _kernel(llama.rms_norm)
    rms_norm_stats = _kernel(llama.rms_norm_stats)
    rms_norm_backward = _kernel(llama.rms_norm_backward)
    rotary = _kernel(llama.rotary)
    swiglu = _kernel(llama.swiglu)
    swiglu_backward = _kernel(llama.swiglu_backward)
    embedding = _kernel(tokens.embedding)
    embedding_backward = _kernel(tokens.embedding_backward)
    cross_entropy = _kernel(tokens.cross_entropy)
    cross_entropy_shares = _kernel(tokens.cross_entropy_shares)
    cross_entropy_backward = _kernel(tokens.cross_entropy_backward)
    sample_labels = _kernel(tokens.sample_labels)
    reduce = _kernel(update.reduce)
    sum_squares = _kernel(update.sum_squares)
    finite_probe = _kernel(update.finite_probe)
    adam = _kernel(update.adam)
    adam8bit = _kernel(update.adam8bit)
    elementwise = _kernel(update.elementwise)
