"""The NumPy backend: the contract of `kernels.py`, and in which file each kernel is.

Every kernel runs with floating-point warnings off: inf and nan are ordinary results here, as on a GPU. A loss scaler or
a norm finds them in the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import numpy as np

from zerosim.backends.kernels import made_of
from zerosim.backends.numpy import (
    activations,
    attention,
    blocks,
    coded,
    experts,
    flash,
    fused,
    gptq,
    llama,
    nf4,
    ops,
    tokens,
    update,
)
from zerosim.backends.numpy.memory import keep_freed_memory
from zerosim.errors import InputError

P = ParamSpec("P")


def _kernel(run: Callable[P, None]) -> staticmethod[P, None]:
    """`run` as a method of a stateless backend, with warnings off for as long as it runs."""
    return staticmethod(np.errstate(all="ignore")(run))


@made_of(
    ops, coded, experts, fused, activations, attention, blocks, flash, gptq, llama, nf4, tokens, update, method=_kernel
)
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
        raise InputError(
            "collective native: NumPy threads have no native collectives; choose direct or ring, or --world mpi"
        )
