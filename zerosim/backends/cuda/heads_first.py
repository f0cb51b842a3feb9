"""Heads first and back, on the device: rows of packed heads as contiguous matrices, one for each sequence and key-value
head, so that one strided-batched product multiplies them all.

Packed rows are views (sequences, tokens, columns) of q, k and v: whole heads of columns, side by side. Heads first they
are (n, T S, d), (n, U, d) and (n, U, d'), of n sequences times key-value heads. The S = H/K query heads of a token that
share a key-value head lie next to each other: they are rows of one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import cupy as cp

from zerosim.backends.cuda.types import NULL, raw, run_rows
from zerosim.backends.kernels import Array

_ROWS = r"""
// A row is one head of one token: of q (sequences, groups, queries, sharing), then of k and of v (.., keys).
// of: 0 q, 1 k, 2 v; token and column: where they begin, packed; first: where the row begins, heads first.
struct Row { long long of, token, column, first, columns; };
__device__ inline Row row_at(
    long long row, long long groups, long long sharing, long long queries, long long keys, long long width,
    long long value, long long q_sequence, long long q_token, long long k_sequence, long long k_token,
    long long v_sequence, long long v_token) {
    const long long of_queries = queries * sharing, each = of_queries + 2 * keys, n = row / each;
    const long long sequence = n / groups, group = n % groups, at = row % each;
    if (at < of_queries) {
        const long long column = (group * sharing + at % sharing) * width;
        return {0, sequence * q_sequence + at / sharing * q_token, column, (n * of_queries + at) * width, width};
    }
    const long long key = (at - of_queries) % keys, place = n * keys + key;
    if (at < of_queries + keys)
        return {1, sequence * k_sequence + key * k_token, group * width, place * width, width};
    return {2, sequence * v_sequence + key * v_token, group * value, place * value, value};
}
#define SIZES \
    long long rows, long long groups, long long sharing, long long queries, long long keys, long long width, \
    long long value, long long q_sequence, long long q_token, long long k_sequence, long long k_token, \
    long long v_sequence, long long v_token
#define ROW \
    const long long number = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y; \
    if (number >= rows) return; \
    const Row row = row_at(number, groups, sharing, queries, keys, width, value, q_sequence, q_token, k_sequence, \
        k_token, v_sequence, v_token);

template <class T> __global__ void to_heads(
    const T* q, const T* k, const T* v, T* q_first, T* k_first, T* v_first, SIZES) {
    ROW
    const T* const from = (row.of == 0 ? q : row.of == 1 ? k : v) + row.token + row.column;
    T* const to = (row.of == 0 ? q_first : row.of == 1 ? k_first : v_first) + row.first;
    const int each = 8 / sizeof(T);
    const unsigned long long places[2] = {
        reinterpret_cast<unsigned long long>(from), reinterpret_cast<unsigned long long>(to)};
    if (row.columns % each == 0 && (places[0] | places[1]) % 8 == 0) {  // 8 bytes a thread
        for (long long j = threadIdx.x; j < row.columns / each; j += blockDim.x)
            reinterpret_cast<long long*>(to)[j] = reinterpret_cast<const long long*>(from)[j];
    } else {
        for (long long j = threadIdx.x; j < row.columns; j += blockDim.x) to[j] = from[j];
    }
}

template <class S, class P> __global__ void from_heads(
    const S* q_first, const S* k_first, const S* v_first, P* q, P* k, P* v, SIZES, long long q_column,
    long long k_column, long long v_column, long long add) {
    ROW
    const S* const from = (row.of == 0 ? q_first : row.of == 1 ? k_first : v_first) + row.first;
    const long long step = row.of == 0 ? q_column : row.of == 1 ? k_column : v_column;
    P* const to = (row.of == 0 ? q : row.of == 1 ? k : v) + row.token + row.column * step;
    for (long long j = threadIdx.x; j < row.columns; j += blockDim.x)
        store(add ? wide_of(to[j * step]) + from[j] : from[j], to[j * step]);
}
"""


def to_heads(packed: Sequence[Array], groups: int, sharing: int) -> list[Array]:
    """Copy q, or q, k and v, of `groups` key-value heads, and return them heads first. Their columns are contiguous."""
    first = [cp.empty(shape, packed[0].dtype) for shape in _shapes(packed, groups, sharing)]
    kernel = raw(_ROWS, "to_heads", (packed[0].dtype,))
    sizes, columns = _sizes(packed, groups, sharing)
    run_rows(kernel, sizes[0], columns, *_three(packed), *_three(first), *sizes)
    return first


def from_heads(
    first: Sequence[Array], packed: Sequence[Array], groups: int, sharing: int, *, add: bool = False
) -> None:
    """Write q, or q, k and v, heads first and in the compute dtype, to `packed` (with `add`, add them there)."""
    kernel = raw(_ROWS, "from_heads", (first[0].dtype, packed[0].dtype))
    sizes, columns = _sizes(packed, groups, sharing)
    steps = [x.strides[2] // x.itemsize for x in packed] + [0] * (3 - len(packed))
    run_rows(kernel, sizes[0], columns, *_three(first), *_three(packed), *sizes, *steps, int(add))


def _three(arrays: Sequence[Array]) -> tuple[Array, ...]:
    return (*arrays, *[NULL] * (3 - len(arrays)))


def _shapes(packed: Sequence[Array], groups: int, sharing: int) -> list[tuple[int, int, int]]:
    """Return the shapes heads first."""
    shared = (sharing, 1, 1)
    return [
        (len(x) * groups, x.shape[1] * each, x.shape[2] // (groups * each))
        for x, each in zip(packed, shared, strict=False)
    ]


def _sizes(packed: Sequence[Array], groups: int, sharing: int) -> tuple[tuple[int, ...], int]:
    """Return the kernels' SIZES, and the columns of the widest row."""
    shapes = _shapes(packed, groups, sharing)
    keys = shapes[1][1] if len(packed) > 1 else 0
    rows, width, value = shapes[0][0] * (shapes[0][1] + 2 * keys), shapes[0][2], shapes[-1][2]
    strides = [step // x.itemsize for x in packed for step in x.strides[:2]]
    places = groups, sharing, packed[0].shape[1], keys, width, value
    return (rows, *places, *strides, *[0] * (6 - len(strides))), max(width, value)
