"""Llama's own layers on the device: RMS norm (of rows, of heads) and SwiGLU, with their backward halves.

Formulas and the order of their roundings are those of `numpy/llama.py`; sums over rows and columns are taken in an
order that depends on shapes alone. M rows, D width, F width of SwiGLU's result.
"""

from __future__ import annotations

import cupy as cp

from zerosim.backends.cuda.arrays import dense, result_for
from zerosim.backends.cuda.types import NULL, elementwise, raw, run_rows, run_threads
from zerosim.backends.kernels import Array
from zerosim.backends.numpy.cast import wide

_FACTOR = r"""
template <class W> __device__ inline typename wide<W>::type factor_of(const W& weight, double offset) {
    return offset == 0 ? wide_of(weight) : wide_of(weight) + typename wide<W>::type(offset);
}
"""

_NORM = (
    _FACTOR
    + r"""
// 1 / sqrt(average of squares + eps) of one row; every thread of the row gets it.
template <class T> __device__ inline typename wide<T>::type row_rstd(
    const T* x, long long columns, double eps, typename wide<T>::type* shared) {
    using V = typename wide<T>::type;
    V sum = 0;
    for (long long j = threadIdx.x; j < columns; j += blockDim.x) sum += wide_of(x[j]) * wide_of(x[j]);
    return V(1) / sqrt(row_sum(sum, shared) / V(columns) + V(eps));
}

// out null: the statistics alone.
template <class T, class W, class U> __global__ void rms_norm(
    const T* x, const W* weight, U* out, typename wide<T>::type* rstd, long long rows, long long columns, double eps,
    double offset) {
    __shared__ typename wide<T>::type shared[32];
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const typename wide<T>::type scale = row_rstd(x + row * columns, columns, eps, shared);
    if (threadIdx.x == 0) rstd[row] = scale;
    if (!out) return;
    for (long long j = threadIdx.x; j < columns; j += blockDim.x)
        store(wide_of(x[row * columns + j]) * scale * factor_of(weight[j], offset), out[row * columns + j]);
}
"""
)

_BACKWARD = (
    _FACTOR
    + r"""
// With n = x * rstd and g = grad * weight: dx = (g - n * average(g * n)) * rstd.
template <class G, class T, class W, class U> __global__ void rms_norm_dx(
    const G* grad, const T* x, const W* weight, const typename wide_both<G, T>::type* rstd, U* dx, long long rows,
    long long columns, double offset) {
    using V = typename wide_both<G, T>::type;
    __shared__ V shared[32];
    const long long row = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const long long start = row * columns;
    const V scale = rstd[row];
    V slope = 0;
    for (long long j = threadIdx.x; j < columns; j += blockDim.x)
        slope += V(wide_of(grad[start + j])) * (V(wide_of(x[start + j])) * scale) * V(factor_of(weight[j], offset));
    slope = row_sum(slope, shared) / V(columns);
    for (long long j = threadIdx.x; j < columns; j += blockDim.x) {
        const V normed = V(wide_of(x[start + j])) * scale;
        const V g = V(wide_of(grad[start + j])) * V(factor_of(weight[j], offset));
        store((g - normed * slope) * scale, dx[start + j]);
    }
}

// partial (parts, columns): the sums of grad * x * rstd over `run` consecutive rows each; 32 columns by 8 rows a block.
template <class G, class T> __global__ void rms_norm_partial(
    const G* grad, const T* x, const typename wide_both<G, T>::type* rstd, typename wide_both<G, T>::type* partial,
    long long rows, long long columns, long long run) {
    using V = typename wide_both<G, T>::type;
    __shared__ V shared[8][32];
    const long long column = static_cast<long long>(blockIdx.x) * 32 + threadIdx.x, first = blockIdx.y * run;
    const long long stop = first + run < rows ? first + run : rows;
    V sum = 0;
    if (column < columns)
        for (long long row = first + threadIdx.y; row < stop; row += 8)
            sum += V(wide_of(grad[row * columns + column])) * (V(wide_of(x[row * columns + column])) * rstd[row]);
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= columns) return;
    for (int i = 1; i < 8; ++i) sum += shared[i][threadIdx.x];
    partial[blockIdx.y * columns + column] = sum;
}

template <class S, class U> __global__ void add_partials(
    const S* partial, U* out, long long parts, long long columns) {
    const long long column = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    S sum = 0;
    for (long long i = 0; i < parts; ++i) sum += partial[i * columns + column];
    store(sum, out[column]);
}
"""
)

_ROWS = 64
_MOST_PARTS = 256

_SIGMOID = "typedef wide<T>::type V; const V g = wide_of(gate), s = V(1) / (V(1) + exp(-g)); "
_silu = elementwise("T gate", "U y", _SIGMOID + "store(g * s, y);", "silu")
_swiglu = elementwise("T gate, T up", "U y", _SIGMOID + "store(g * s * wide_of(up), y);", "swiglu")
_swiglu_backward = elementwise(
    "G grad, T gate, T up",
    "U dgate, U dup",
    _SIGMOID
    + "const V d = wide_of(grad), u = wide_of(up);"
    + "store(((V(1) - s) * g + V(1)) * s * u * d, dgate);"
    + "store(s * g * d, dup);",
    "swiglu_backward",
)


# -- RMS norm -----------------------------------------------------------------------------------------
def rms_norm(x: Array, weight: Array, eps: float, out: Array, rstd: Array, offset: float = 0.0) -> None:
    if not x.size:
        return
    kernel = raw(_NORM, "rms_norm", (x.dtype, weight.dtype, out.dtype))
    with result_for(out) as result, result_for(rstd, wide(x)) as stats:
        run_rows(kernel, *x.shape, dense(x), dense(weight), result, stats, *x.shape, float(eps), float(offset))


def rms_norm_stats(x: Array, eps: float, rstd: Array) -> None:
    if not x.size:
        return
    kernel = raw(_NORM, "rms_norm", (x.dtype, x.dtype, x.dtype))
    with result_for(rstd, wide(x)) as stats:
        run_rows(kernel, *x.shape, dense(x), NULL, NULL, stats, *x.shape, float(eps), 0.0)


def rms_norm_backward(
    grad: Array,
    x: Array,
    weight: Array,
    rstd: Array,
    dx: Array | None,
    dweight: Array | None,
    offset: float = 0.0,
) -> None:
    """Scratch: M/64 rows of D numbers in the compute dtype, 256 at most: dweight's sums over runs of rows."""
    (rows, columns), compute = x.shape, wide(x, grad)
    if not columns:
        return
    gradient, source, scales, stats = dense(grad), dense(x), dense(weight), dense(rstd, compute)
    if dx is not None and rows:
        kernel = raw(_BACKWARD, "rms_norm_dx", (grad.dtype, x.dtype, weight.dtype, dx.dtype))
        with result_for(dx) as result:
            run_rows(kernel, rows, columns, gradient, source, scales, stats, result, rows, columns, float(offset))
    if dweight is None:
        return
    run = max(_ROWS, -(-rows // _MOST_PARTS))
    parts = max(1, -(-rows // run))
    partial = cp.empty((parts, columns), compute)
    kernel = raw(_BACKWARD, "rms_norm_partial", (grad.dtype, x.dtype))
    kernel((-(-columns // 32), parts), (32, 8), (gradient, source, stats, partial, rows, columns, run))
    with result_for(dweight) as total:
        run_threads(raw(_BACKWARD, "add_partials", (compute, dweight.dtype)), columns, partial, total, parts, columns)


def head_norm(x: Array, weight: Array, eps: float, out: Array, rstd: Array, offset: float = 0.0) -> None:
    """Scratch: copies of x and out, unless they are contiguous."""
    rows = -1, weight.size
    with result_for(out) as result, result_for(rstd, wide(x)) as stats:
        rms_norm(dense(x).reshape(rows), weight, eps, result.reshape(rows), stats.reshape(-1), offset)


def head_norm_backward(
    grad: Array, x: Array, weight: Array, rstd: Array, dx: Array, dweight: Array | None, offset: float = 0.0
) -> None:
    """Scratch: copies of grad, x and dx, unless they are contiguous, and `rms_norm_backward`'s."""
    rows = -1, weight.size
    with result_for(dx) as result:
        sources = dense(grad).reshape(rows), dense(x).reshape(rows), weight, dense(rstd).reshape(-1)
        rms_norm_backward(*sources, result.reshape(rows), dweight, offset)


# -- SwiGLU -----------------------------------------------------------------------------------------------
def silu(x: Array, out: Array) -> None:
    if out.size:
        _silu(x, out)


def swiglu(x: Array, out: Array) -> None:
    width = out.shape[1]
    if out.size:
        _swiglu(x[:, :width], x[:, width:], out)


def swiglu_backward(grad: Array, x: Array, dx: Array) -> None:
    width = grad.shape[1]
    if grad.size:
        _swiglu_backward(grad, x[:, :width], x[:, width:], dx[:, :width], dx[:, width:])
