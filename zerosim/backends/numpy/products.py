"""Products in NumPy whose bits depend on values and shapes alone, not on where in memory an operand starts.

BLAS multiplies matrices, and matrices with vectors, in an order that shapes decide. The exception is a row times a
column, which NumPy hands to BLAS's dot: OpenBLAS's SSE2 kernels (CPUs without AVX) begin it with single elements up to
the next 16 bytes, so that a slice of a buffer is not added as its copy would be. Here it is NumPy's own pairwise sum.
"""

from __future__ import annotations

import numpy as np

from zerosim.backends.kernels import Array


def product(a: Array, b: Array, out: Array | None = None) -> Array:
    """a @ b, as np.matmul has it: vectors and stacks of matrices included."""
    rows = a.shape[-2] if a.ndim > 1 else 1
    columns = b.shape[-1] if b.ndim > 1 else 1
    if rows != 1 or columns != 1:
        return np.matmul(a, b, out=out)
    row, column = a[..., 0, :] if a.ndim > 1 else a, b[..., 0] if b.ndim > 1 else b
    result = np.asarray(np.add.reduce(row * column, axis=-1))
    result = result.reshape(result.shape + (1,) * ((a.ndim > 1) + (b.ndim > 1)))
    if out is None:
        return result
    out[...] = result
    return out
