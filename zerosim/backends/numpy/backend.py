"""The NumPy backend: the contract of `kernels.py`, and in which file each kernel is.

Every kernel runs with floating-point warnings off: inf and nan are results like others here, as they
are on a GPU. What looks for them (a loss scaler, a norm) does so in the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import numpy as np

from zerosim.backends.numpy import attention as numpy_attention
from zerosim.backends.numpy import flash as numpy_flash
from zerosim.backends.numpy import fused as numpy_fused
from zerosim.backends.numpy import llama as numpy_llama
from zerosim.backends.numpy import ops as numpy_ops
from zerosim.backends.numpy import tokens as numpy_tokens
from zerosim.backends.numpy import update as numpy_update
from zerosim.backends.numpy.memory import keep_freed_memory
from zerosim.errors import InputError

P = ParamSpec("P")


def _kernel(run: Callable[P, None]) -> staticmethod[P, None]:
    """`run` as a method of a stateless backend, with warnings off for as long as it runs."""
    return staticmethod(np.errstate(all="ignore")(run))


class NumpyBackend:
    """Implements `Backend` on the CPU; bfloat16 arrays are those of ml_dtypes."""

    name = "numpy"

    def __init__(self) -> None:
        keep_freed_memory()

    def open_stream(self, rank: int) -> None:
        """None: kernels run when they are called."""

    def native_collective(self, *args: object) -> None:
        """Raises: InputError, always."""
        raise InputError("collective native: NumPy on threads has none; choose direct or ring, or --world mpi")

    empty = staticmethod(numpy_ops.empty)
    from_host = _kernel(numpy_ops.from_host)
    to_host = staticmethod(numpy_ops.to_host)
    to_host_later = staticmethod(numpy_ops.to_host_later)
    fill = _kernel(numpy_ops.fill)
    copy = _kernel(numpy_ops.copy)

    add = _kernel(numpy_ops.add)
    subtract = _kernel(numpy_ops.subtract)
    multiply = _kernel(numpy_ops.multiply)
    divide = _kernel(numpy_ops.divide)
    exp = _kernel(numpy_ops.exp)
    log = _kernel(numpy_ops.log)
    sqrt = _kernel(numpy_ops.sqrt)
    tanh = _kernel(numpy_ops.tanh)
    sum_to = _kernel(numpy_ops.sum_to)
    max_to = _kernel(numpy_ops.max_to)
    mask_future = _kernel(numpy_ops.mask_future)
    matmul = _kernel(numpy_ops.matmul)

    linear = _kernel(numpy_fused.linear)
    column_sum = _kernel(numpy_fused.column_sum)
    layer_norm = _kernel(numpy_fused.layer_norm)
    layer_norm_stats = _kernel(numpy_fused.layer_norm_stats)
    layer_norm_backward = _kernel(numpy_fused.layer_norm_backward)
    gelu = _kernel(numpy_fused.gelu)
    gelu_backward = _kernel(numpy_fused.gelu_backward)
    dropout_mask = _kernel(numpy_fused.dropout_mask)
    dropout = _kernel(numpy_fused.dropout)
    attention = _kernel(numpy_attention.attention)
    attention_backward = _kernel(numpy_attention.attention_backward)
    flash_attention = _kernel(numpy_flash.flash_attention)
    flash_attention_backward = _kernel(numpy_flash.flash_attention_backward)
    rms_norm = _kernel(numpy_llama.rms_norm)
    rms_norm_stats = _kernel(numpy_llama.rms_norm_stats)
    rms_norm_backward = _kernel(numpy_llama.rms_norm_backward)
    rotary = _kernel(numpy_llama.rotary)
    swiglu = _kernel(numpy_llama.swiglu)
    swiglu_backward = _kernel(numpy_llama.swiglu_backward)
    embedding = _kernel(numpy_tokens.embedding)
    embedding_backward = _kernel(numpy_tokens.embedding_backward)
    cross_entropy = _kernel(numpy_tokens.cross_entropy)
    cross_entropy_backward = _kernel(numpy_tokens.cross_entropy_backward)

    reduce = _kernel(numpy_update.reduce)
    sum_squares = _kernel(numpy_update.sum_squares)
    finite_probe = _kernel(numpy_update.finite_probe)
    adam = _kernel(numpy_update.adam)
    sgd = _kernel(numpy_update.sgd)
