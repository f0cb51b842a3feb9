"""Sums over the rows of a matrix in CUDA: a bias's gradient, and the second stage of a norm's.

A block adds a patch of 32 columns and `height` rows; where there are more rows, the patches' sums go through
scratch and are added by a second launch. The order of every addition depends on shapes alone.
"""

from __future__ import annotations

import cupy as cp
import numpy as np

from zerosim.backends.cuda.arrays import dense, landing
from zerosim.backends.cuda.types import raw
from zerosim.backends.kernels import Array
from zerosim.backends.numpy.cast import wide

ROWS_IN_A_STAGE = 128
"""Rows that a block of a column sum adds: 8,192 rows of 768 columns make 1,536 blocks."""
MOST_STAGES = 256
"""Partial sums that a column has at most: what the second stage then adds."""


COLUMN_SUM = r"""
// out[blockIdx.y] = the sum of rows [blockIdx.y * height, + height): 32 columns and 8 rows of threads a block.
template <class T, class O>
__global__ void column_sum(const T* a, O* out, long long rows, int columns, int height) {
    using W = typename wide<T>::type;
    __shared__ W sums[8][33];
    const int c = blockIdx.x * 32 + threadIdx.x;
    const long long first = static_cast<long long>(blockIdx.y) * height;
    const long long stop = first + height < rows ? first + height : rows;
    W total = 0;
    if (c < columns) {
        for (long long row = first + threadIdx.y; row < stop; row += 8) total += wide_of(a[row * columns + c]);
    }
    sums[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y != 0 || c >= columns) return;
    for (int y = 1; y < 8; ++y) total += sums[y][threadIdx.x];
    store(total, out[static_cast<long long>(blockIdx.y) * columns + c]);
}
"""


def column_sum(grad: Array, out: Array) -> None:
    """Scratch: up to MOST_STAGES rows of out's size, in the compute dtype."""
    (rows, columns), compute = grad.shape, wide(grad)
    if not columns:
        return
    height, stages = stages_of(rows)
    source = dense(grad)
    with landing(out) as target:
        if stages == 1:
            add_rows(source, target, height)
        else:
            partial = cp.empty((stages, columns), compute)
            add_rows(source, partial, height)
            add_rows(partial, target, stages)


def stages_of(rows: int) -> tuple[int, int]:
    """Rows in a partial sum, and how many there are: a function of the number of rows alone."""
    height = max(ROWS_IN_A_STAGE, -(-rows // MOST_STAGES))
    return height, max(1, -(-rows // height))


def add_rows(source: Array, out: Array, height: int) -> None:
    """out (stages, columns), or (columns): sums of `height` rows of source each."""
    rows, columns = source.shape
    grid = (-(-columns // 32), max(1, -(-rows // height)))
    kernel = raw(COLUMN_SUM, "column_sum", (source.dtype, out.dtype))
    kernel(grid, (32, 8), (source, out, rows, np.int32(columns), np.int32(height)))
