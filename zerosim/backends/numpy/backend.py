"""The NumPy backend: the contract of `kernels.py`, and in which file each kernel is.

Every kernel runs with floating-point warnings off: inf and nan are results like others here, as they
are on a GPU. What looks for them (a loss scaler, a norm) does so in the values.
"""

from __future__ import annotations

import numpy as np

from zerosim.backends.numpy import attention, flash, fused, llama, ops, tokens, update
from zerosim.backends.numpy.memory import keep_freed_memory
from zerosim.errors import InputError

# fmt: off
KERNELS = (
    ops.from_host, ops.fill, ops.copy,
    ops.add, ops.subtract, ops.multiply, ops.divide, ops.exp, ops.log, ops.sqrt, ops.tanh,
    ops.sum_to, ops.max_to, ops.mask_future, ops.matmul,
    fused.linear, fused.column_sum, fused.layer_norm, fused.layer_norm_stats, fused.layer_norm_backward,
    fused.gelu, fused.gelu_backward, fused.dropout_mask, fused.dropout,
    attention.attention, attention.attention_backward, flash.flash_attention, flash.flash_attention_backward,
    llama.rms_norm, llama.rms_norm_stats, llama.rms_norm_backward,
    llama.rotary, llama.swiglu, llama.swiglu_backward,
    tokens.embedding, tokens.embedding_backward,
    tokens.cross_entropy, tokens.cross_entropy_shares, tokens.cross_entropy_backward,
    update.reduce, update.sum_squares, update.finite_probe, update.adam, update.sgd,
)
# fmt: on


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


for kernel in KERNELS:
    setattr(NumpyBackend, kernel.__name__, staticmethod(np.errstate(all="ignore")(kernel)))
