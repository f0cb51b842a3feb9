"""NumPy arrays over memory that somebody else owns: MPI's buffers, while it adds."""

from __future__ import annotations

from typing import Any

import numpy as np

from zerosim.backends.kernels import Array
from zerosim.backends.numpy_ops import NUMPY_TYPES
from zerosim.dtypes import DType


def array_over(memory: Any, dtype: DType) -> Array:
    """The flat array that these bytes are; writable where they are."""
    return np.frombuffer(memory, NUMPY_TYPES[dtype.name])
