"""Products on the device against NumPy's: layouts, types, broadcasting, nothing at all; and the same bits twice."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
import pytest
from cuda_arrays import Values, assert_close, both, from_device, junk, rounded, strided, to_device

from zerosim.backends.cuda import products as cuda_products
from zerosim.backends.numpy import fused as numpy_fused
from zerosim.backends.numpy import ops as numpy_ops
from zerosim.dtypes import FLOATING, DType, bf16, compute_dtype, fp16, fp32, fp64

every_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=str)


def numbers(*shape: int, seed: int = 0) -> Values:
    return np.random.default_rng(seed).standard_normal(shape)


def slack(a: Values, b: Values, dtype: DType) -> Any:
    """What sums of products may differ by, added in another order: a rounding of the largest sum for each addition."""
    return (a.shape[-1] + 2) * compute_dtype(dtype).eps * (np.abs(a).astype(float) @ np.abs(b).astype(float))


# rows, inner, columns; then leading dims of a and of b
SHAPES = [(1, 1, 1), (5, 3, 4), (37, 70, 29), (70, 1, 37), (1, 64, 33), (33, 64, 1)]
LEADS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), ()),
    ((3,), (3,)),
    ((2, 3), ()),
    ((), (2, 3)),
    ((2, 1, 3), (1, 4, 3)),
    ((1, 3), (2, 1)),
    ((2, 3), (3,)),
]


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
def test_matmul(dtype: DType, shape: tuple[int, int, int], transposed: str) -> None:
    rows, inner, columns = shape
    a, b = rounded(numbers(rows, inner), dtype), rounded(numbers(inner, columns, seed=1), dtype)

    def cuda(x: Any, y: Any, out: Any) -> None:
        cuda_products.matmul(x.T if "a" in transposed else x, y.T if "b" in transposed else y, out)

    def host(x: Any, y: Any, out: Any) -> None:
        numpy_ops.matmul(a, b, out)

    stored = [np.ascontiguousarray(x.T) if name in transposed else x for name, x in (("a", a), ("b", b))]
    ((got, wanted),) = both(host, cuda, stored, [junk((rows, columns), a.dtype)])
    assert_close(got, wanted, dtype, slack(a, b, dtype))


@every_dtype
@pytest.mark.parametrize("leads", LEADS, ids=str)
def test_matmul_broadcasts_leading_dims(dtype: DType, leads: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = rounded(numbers(*leads[0], 5, 7), dtype), rounded(numbers(*leads[1], 7, 4, seed=1), dtype)
    out = junk((*np.broadcast_shapes(*leads), 5, 4), a.dtype)
    ((got, wanted),) = both(numpy_ops.matmul, cuda_products.matmul, [a, b], [out])
    assert_close(got, wanted, dtype, slack(a, b, dtype))
    ((got, again),) = both(numpy_ops.matmul, cuda_products.matmul, [a, b], [out], strided)
    assert np.array_equal(wanted, again)
    assert_close(got, wanted, dtype, slack(a, b, dtype))


@every_dtype
def test_windows_are_read_and_written_in_place(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a packed array, heads of packed columns: no scratch, and nothing beside the window changes."""
    packed, weight = rounded(numbers(6, 24), dtype), rounded(numbers(5, 8, seed=1), dtype)
    heads, target = to_device(packed).reshape(6, 3, 8).transpose(1, 0, 2), to_device(junk((6, 20), packed.dtype))
    across, window = to_device(weight).T, target[:, 3:18].reshape(6, 3, 5).transpose(1, 0, 2)

    def refuse(*_: Any) -> None:
        raise AssertionError("scratch was asked for")

    monkeypatch.setattr(cp, "empty", refuse)
    cuda_products.matmul(heads, across, window)
    monkeypatch.undo()
    got = from_device(target).astype(float)
    left, right = packed.reshape(6, 3, 8).transpose(1, 0, 2), weight.T
    wanted = left.astype(float) @ right.astype(float)
    assert_close(got[:, 3:18].reshape(6, 3, 5).transpose(1, 0, 2), wanted, dtype, slack(left, right, dtype))
    assert np.isnan(got[:, :3]).all()
    assert np.isnan(got[:, 18:]).all()


@pytest.mark.parametrize(
    ("shapes", "calls"),
    [
        (((2, 3, 4, 5), (2, 3, 5, 6)), 1),  # evenly apart: one batch
        (((2, 3, 4, 5), (5, 6)), 1),
        (((7, 3, 4, 5), (7, 1, 5, 6)), 3),  # the longer dim is the batch
        (((4, 5), (5, 6)), 1),
    ],
)
def test_calls_are_as_few_as_strides_allow(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    real = cuda_products.cublas

    class Counting:
        def __getattr__(self, name: str) -> Any:
            found = getattr(real, name)
            return found if not name.startswith("gemm") else lambda *words: (made.append(name), found(*words))

    a, b = (to_device(rounded(numbers(*shape), fp32)) for shape in shapes)
    out = to_device(junk((*shapes[0][:-1], 6), a.dtype))
    monkeypatch.setattr(cuda_products, "cublas", Counting())
    cuda_products.matmul(a, b, out)
    assert len(made) == calls


# two operands and a result
TYPES = [
    (bf16, bf16, fp32),
    (fp16, fp16, fp32),
    (fp16, fp32, fp32),
    (bf16, fp32, bf16),
    (fp32, fp32, fp16),
    (fp16, bf16, fp32),
    (fp32, fp32, fp64),
    (fp64, fp32, bf16),
    (fp64, fp64, fp16),
]


@pytest.mark.parametrize(("left", "right", "result"), TYPES, ids=str)
def test_types_may_be_mixed(left: DType, right: DType, result: DType) -> None:
    a, b = rounded(numbers(9, 33), left), rounded(numbers(33, 5, seed=1), right)
    out = junk((9, 5), rounded(0.0, result).dtype)
    ((got, wanted),) = both(numpy_ops.matmul, cuda_products.matmul, [a, b], [out])
    compute = fp64 if fp64 in (left, right) else fp32
    assert_close(got, wanted, result, slack(a.astype(float), b.astype(float), compute))


def test_a_linears_bias_is_rounded_with_the_sum_not_before() -> None:
    """Half a last place of bf16 at 1 is 2**-8: neither bias nor product reaches it, their sum goes beyond."""
    x, weight, bias = (rounded(a, fp32) for a in ([[1.0]], [[2.0**-9 + 2.0**-10]], [1.0 + 2.0**-9]))
    out = junk((1, 1), rounded(0.0, bf16).dtype)
    ((got, wanted),) = both(numpy_fused.linear, cuda_products.linear, [x, weight, bias], [out])
    assert got == wanted == 1.0 + 2.0**-7


@pytest.mark.parametrize("shape", [(0, 3, 4), (5, 0, 4), (5, 3, 0), (0, 0, 0)], ids=str)
def test_nothing_to_multiply(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    for dtype in FLOATING:
        a, b, bias = (rounded(np.ones(s), dtype) for s in ((rows, inner), (inner, columns), (columns,)))
        for row, value in ((None, 0.0), (bias, 1.0)):
            ((got, wanted),) = both(
                numpy_fused.linear, cuda_products.linear, [a, b, row], [junk((rows, columns), a.dtype)]
            )
            assert got.shape == wanted.shape
            assert inner or (got == value).all()
        stack = rounded(np.ones((2, rows, inner)), dtype)
        both(numpy_ops.matmul, cuda_products.matmul, [stack, b], [junk((2, rows, columns), a.dtype)])


@every_dtype
def test_a_product_is_scaled_and_added_to_what_was_there(dtype: DType) -> None:
    a, b, before = (rounded(numbers(*s), dtype) for s in ((2, 6, 5), (2, 5, 7), (2, 6, 7)))
    for place in (to_device, strided):
        out = place(before)
        cuda_products.product(place(a), place(b), out, scale=0.3, add=True)
        wanted = before.astype(float) + 0.3 * (a.astype(float) @ b.astype(float))
        got = from_device(out).astype(float)
        assert_close(got, wanted, dtype, slack(a, b, dtype) + 4 * compute_dtype(dtype).eps * np.abs(wanted))
