"""Layer norm in CUDA, and sums over the rows of a matrix: a bias's gradient, the norm's own. Formulas: numpy/fused.py.

A warp or a block processes a row (`run_rows`). In a column sum a block adds a patch of 32 columns and `height`
rows. If there are more rows, the patches' sums go through scratch and a second launch adds them. The order of
every addition depends on shapes alone.
"""

from __future__ import annotations

import cupy as cp
import numpy as np

from zerosim.backends.cuda.arrays import dense, result_for
from zerosim.backends.cuda.types import NULL, raw, run_rows
from zerosim.backends.kernels import Array
from zerosim.backends.numpy.cast import wide

ROWS_IN_A_STAGE = 128
"""Rows that a block of a column sum adds: 8,192 rows of 768 columns make 1,536 blocks."""
MOST_STAGES = 256
"""The maximum of partial sums of a column, which the second launch adds."""

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
    with result_for(out) as target:
        if stages == 1:
            add_rows(source, target, height)
        else:
            partial = cp.empty((stages, columns), compute)
            add_rows(source, partial, height)
            add_rows(partial, target, stages)


def stages_of(rows: int) -> tuple[int, int]:
    """Return the rows in a partial sum and the number of partial sums. They depend on the number of rows alone."""
    height = max(ROWS_IN_A_STAGE, -(-rows // MOST_STAGES))
    return height, max(1, -(-rows // height))


def add_rows(source: Array, out: Array, height: int) -> None:
    """out (stages, columns), or (columns): sums of `height` rows of source each."""
    rows, columns = source.shape
    grid = (-(-columns // 32), max(1, -(-rows // height)))
    kernel = raw(COLUMN_SUM, "column_sum", (source.dtype, out.dtype))
    kernel(grid, (32, 8), (source, out, rows, np.int32(columns), np.int32(height)))


# -- layer norm ---------------------------------------------------------------------------------------
LAYER_NORM = r"""
// The mean of a row and 1 / sqrt(variance + eps): the one place that computes them. `shared`: 32 values.
template <class T, class W>
__device__ inline void row_stats(const T* x, int columns, double eps, W* shared, W& mean, W& rstd) {
    W total = 0;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) total += wide_of(x[c]);
    mean = row_sum(total, shared) / W(columns);
    W squares = 0;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const W y = wide_of(x[c]) - mean;
        squares += y * y;
    }
    const W variance = row_sum(squares, shared) / W(columns);
    rstd = W(1) / sqrt(variance + W(eps));
}

// out null: the statistics alone.
template <class T, class P, class O, class W>
__global__ void layer_norm(const T* x, const P* weight, const P* bias, double eps, O* out, W* means, W* rstds,
                           long long rows, int columns) {
    __shared__ W shared[32];
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    x += row * columns;
    W mean, rstd;
    row_stats(x, columns, eps, shared, mean, rstd);
    if (threadIdx.x == 0) { means[row] = mean; rstds[row] = rstd; }
    if (!out) return;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const W normed = (wide_of(x[c]) - mean) * rstd;
        const W scaled = normed * W(wide_of(weight[c]));
        store(bias ? scaled + W(wide_of(bias[c])) : scaled, out[row * columns + c]);
    }
}

// With n = (x - mean) * rstd and g = grad * weight: dx = rstd * (g - average(g) - n * average(g * n)).
template <class G, class T, class P, class W, class O>
__global__ void layer_norm_dx(const G* grad, const T* x, const P* weight, const W* means, const W* rstds, O* dx,
                              long long rows, int columns) {
    __shared__ W shared[32];
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    grad += row * columns;
    x += row * columns;
    dx += row * columns;
    const W mean = means[row], rstd = rstds[row];
    W average = 0, slope = 0;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const W g = W(wide_of(grad[c])) * W(wide_of(weight[c]));
        average += g;
        slope += g * ((W(wide_of(x[c])) - mean) * rstd);
    }
    average = row_sum(average, shared) / W(columns);
    slope = row_sum(slope, shared) / W(columns);
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const W g = W(wide_of(grad[c])) * W(wide_of(weight[c]));
        const W normed = (W(wide_of(x[c])) - mean) * rstd;
        store((g - normed * slope - average) * rstd, dx[c]);
    }
}

// Stage one of dweight = sum of grad * n and dbias = sum of grad over rows: as column_sum, for both at once.
template <class G, class T, class W>
__global__ void layer_norm_columns(const G* grad, const T* x, const W* means, const W* rstds, W* dweight, W* dbias,
                                   long long rows, int columns, int height) {
    __shared__ W weights[8][33];
    __shared__ W biases[8][33];
    const int c = blockIdx.x * 32 + threadIdx.x;
    const long long first = static_cast<long long>(blockIdx.y) * height;
    const long long stop = first + height < rows ? first + height : rows;
    W weight_sum = 0, bias_sum = 0;
    if (c < columns) {
        for (long long row = first + threadIdx.y; row < stop; row += 8) {
            const W g = wide_of(grad[row * columns + c]);
            weight_sum += g * ((W(wide_of(x[row * columns + c])) - means[row]) * rstds[row]);
            bias_sum += g;
        }
    }
    weights[threadIdx.y][threadIdx.x] = weight_sum;
    biases[threadIdx.y][threadIdx.x] = bias_sum;
    __syncthreads();
    if (threadIdx.y != 0 || c >= columns) return;
    for (int y = 1; y < 8; ++y) {
        weight_sum += weights[y][threadIdx.x];
        bias_sum += biases[y][threadIdx.x];
    }
    dweight[static_cast<long long>(blockIdx.y) * columns + c] = weight_sum;
    dbias[static_cast<long long>(blockIdx.y) * columns + c] = bias_sum;
}
"""


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float, out: Array, mean: Array, rstd: Array) -> None:
    if not x.size:
        return
    (rows, columns), sources = x.shape, (dense(x), dense(weight), NULL if bias is None else dense(bias))
    kernel = raw(LAYER_NORM, "layer_norm", (x.dtype, weight.dtype, out.dtype, mean.dtype))
    with result_for(out) as y, result_for(mean) as means, result_for(rstd) as rstds:
        run_rows(kernel, rows, columns, *sources, float(eps), y, means, rstds, rows, np.int32(columns))


def layer_norm_stats(x: Array, eps: float, mean: Array, rstd: Array) -> None:
    if not x.size:
        return
    (rows, columns), kernel = x.shape, raw(LAYER_NORM, "layer_norm", (x.dtype, x.dtype, x.dtype, mean.dtype))
    with result_for(mean) as means, result_for(rstd) as rstds:
        run_rows(kernel, rows, columns, dense(x), NULL, NULL, float(eps), NULL, means, rstds, rows, np.int32(columns))


def layer_norm_backward(
    grad: Array,
    x: Array,
    weight: Array,
    mean: Array,
    rstd: Array,
    dx: Array | None,
    dweight: Array | None,
    dbias: Array | None,
) -> None:
    """Scratch: as `column_sum`, twice."""
    (rows, columns), compute = x.shape, mean.dtype
    if not columns:
        return
    grad, x, weight, mean, rstd = (dense(array) for array in (grad, x, weight, mean, rstd))
    if dx is not None and dx.size:
        kernel = raw(LAYER_NORM, "layer_norm_dx", (grad.dtype, x.dtype, weight.dtype, compute, dx.dtype))
        with result_for(dx) as target:
            run_rows(kernel, rows, columns, grad, x, weight, mean, rstd, target, rows, np.int32(columns))
    if dweight is None and dbias is None:
        return
    height, stages = stages_of(rows)
    weights, biases = cp.empty((stages, columns), compute), cp.empty((stages, columns), compute)
    kernel = raw(LAYER_NORM, "layer_norm_columns", (grad.dtype, x.dtype, compute))
    sizes = rows, np.int32(columns), np.int32(height)
    kernel((-(-columns // 32), stages), (32, 8), (grad, x, mean, rstd, weights, biases, *sizes))
    for partial, out in ((weights, dweight), (biases, dbias)):
        if out is not None:
            with result_for(out) as target:
                add_rows(partial, target, stages)
