"""Every kernel of every backend against plain float64 formulas, and what shards and threads rely on:
exact casts, the order of sums, and bits that do not depend on cuts or on alignment.

A case is one call of one kernel: its inputs, its outputs' shapes, and the formula. The `backend` of conftest.py is
NumPy's and CUDA's in turn: one set of promises holds both. What only NumPy's blocks could break is for it alone.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_cases import ADAM, CASES, FLASH_KEY, Case, Values, bits, check, every_case, every_dtype, place, put

from zerosim.backends.kernels import AdamStep, Backend, Dropout, Heads, Probs, Rule, Window
from zerosim.dtypes import FLOATING, DType, bf16, compute_dtype, fp16, fp32, fp64, int64, uint8
from zerosim.optim.elementwise import Now
from zerosim.optim.sgd import SGD

HALVES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


def test_kernels_are_called_as_the_contract_has_it(backend: Backend) -> None:
    for name, declared in vars(Backend).items():
        if callable(declared) and not name.startswith("_") and name != "native_collective":
            _, *expected = inspect.signature(declared).parameters.values()
            found = list(inspect.signature(getattr(backend, name)).parameters.values())
            assert found == expected, name


# -- values ------------------------------------------------------------------------------------------------
@every_case(numpy=FLOATING, cuda=FLOATING)
def test_kernel_computes_its_formula(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    for dtype in dtypes:
        check(backend, case, dtype, *case.run(backend, dtype))


@pytest.mark.quick(10)
@every_case(numpy=[fp16, bf16], cuda=[fp16, bf16])
def test_outputs_may_be_wider_than_inputs(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    for dtype in dtypes:
        check(backend, case, dtype, *case.run(backend, dtype, fp32))


@pytest.mark.quick(10)
@every_case(numpy=[fp32, fp16, bf16], cuda=[fp32, bf16])
def test_arrays_may_be_strided(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    """CUDA's kernels have one path for elements of one size."""
    for dtype in dtypes:
        check(backend, case, dtype, *case.run(backend, dtype, strided=True))


@pytest.mark.quick(10)
@pytest.mark.bits
@every_case(numpy=FLOATING, cuda=[fp32, bf16])
def test_alignment_never_changes_a_bit(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    """cuBLAS chooses how to multiply by the alignment of what it is given: products keep their bits from one block of
    512 bytes to another. CUDA's other kernels go element by element (the one that writes words has a test of its own).
    """
    every: Sequence[int] = (1, 2, 4, 7, 17) if "attention" in case.name else (1, 2, 3, 4, 7, 8, 16, 17)
    if backend.name == "cuda":
        every = (256,) if any(word in case.name for word in ("matmul", "linear", "attention")) else (1, 3)
    for dtype in dtypes:
        first = [bits(backend, a) for a in case.run(backend, dtype)[1]]
        for offset in every:
            found = [bits(backend, a) for a in case.run(backend, dtype, offset=offset)[1]]
            assert found == first, f"{dtype} at offset {offset}"


@pytest.mark.quick(10)
@every_case(FLOATING, FLOATING, [case for case in CASES if any(x.dtype.kind == "f" for x in case.inputs)])
def test_inf_and_nan_are_results_like_others(backend: Backend, case: Case, dtypes: Sequence[DType]) -> None:
    """No warning (warnings are errors; only NumPy has any), and a nan in an input comes out."""
    which = next(i for i, x in enumerate(case.inputs) if x.dtype.kind == "f")
    on_numpy = backend.name == "numpy"
    for dtype, poison in ((t, x) for t in dtypes for x in (np.nan, *((np.inf, -np.inf, t.max) if on_numpy else ()))):
        inputs = [x.copy() for x in case.inputs]
        inputs[which].reshape(-1)[:1] = poison
        poisoned = Case(**{**vars(case), "inputs": inputs})
        outputs = poisoned.run(backend, dtype)[1]
        if np.isnan(poison):
            assert any(np.isnan(backend.to_host(a)).any() for a in outputs[-3:]), dtype


def test_the_contract_is_whole(backend: Backend) -> None:
    for name in [n for n in vars(Backend) if not n.startswith("_") and n != "name"]:
        kernel = getattr(backend, name)
        assert callable(kernel)
        if name != "native_collective":  # which no device records by its name
            assert kernel.__name__ == name


# -- casts ---------------------------------------------------------------------------------------------------
def same(a: Values, b: Values) -> bool:
    """Equal bits, where any nan equals any nan."""
    unsigned = {2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
    return bool(np.all((a.view(unsigned) == b.view(unsigned)) | (np.isnan(a) & np.isnan(b))))


def as_half(backend: Backend, values: Values, dtype: DType) -> Values:
    """The 16-bit patterns that the backend rounds `values` to."""
    source = put(backend, values, fp64 if values.dtype == np.float64 else fp32)
    out = place(backend, values.shape, dtype)
    backend.copy(source, out)
    return np.asarray(backend.to_host(out)).astype(HALVES[dtype.name])  # exact: the values are half's already


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [fp16, bf16], ids=str)
def test_casts_are_exact(backend: Backend, dtype: DType) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(HALVES[dtype.name])
    with np.errstate(all="ignore"):
        wide = every.astype(np.float32)
    assert same(backend.to_host(put(backend, wide, dtype)), wide)

    # Everything within two float32 steps of a half value, of the middle between two, and at random.
    near = (wide.view(np.uint32)[:, None] + np.arange(-2, 3).astype(np.uint32)).reshape(-1)
    half_step = np.uint32(0x1000 if dtype is fp16 else 0x8000)
    subnormal_middles = ((np.arange(1024, dtype=np.float32) + np.float32(0.5)) * np.float32(2**-24)).view(np.uint32)
    around = (subnormal_middles[:, None] + np.arange(-2, 3).astype(np.uint32)).reshape(-1)
    random = np.random.default_rng(1).integers(0, 2**32, 2**17, dtype=np.uint32)
    small = (random & np.uint32(0x87FFFFFF)) | np.uint32(0x30000000)  # where float16 becomes subnormal
    values = np.concatenate([near, near + half_step, around, random, small]).view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(HALVES[dtype.name])
    assert same(as_half(backend, values, dtype), expected)


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [fp16, bf16], ids=str)
def test_fp64_is_rounded_once(backend: Backend, dtype: DType) -> None:
    """Just beside the middle of two halves: by way of float32 it would land on the middle, then on even."""
    lower = np.arange(1.0, 2.0, dtype.eps)
    middle = lower + dtype.eps / 2
    even = np.where(np.arange(lower.size) % 2 == 0, lower, lower + dtype.eps)
    for scale in (1.0, -1.0, 2.0**-10):
        for shift, expected in ((-(2.0**-45), lower), (0.0, even), (2.0**-45, lower + dtype.eps)):
            got = as_half(backend, (middle + shift) * scale, dtype).astype(np.float64)
            assert np.array_equal(got, expected * scale)


@every_dtype
def test_fill_and_copy(backend: Backend, dtype: DType) -> None:
    array = place(backend, (3, 5), dtype)
    backend.fill(array, 0.1)
    once = put(backend, np.full((3, 5), 0.1), dtype)
    assert bits(backend, array) == bits(backend, once)
    backend.fill(array, 1e300)
    assert np.isinf(backend.to_host(array)).all() == (dtype is not fp64)
    values = put(backend, np.arange(15.0).reshape(5, 3), dtype)
    backend.copy(values.T, array)
    assert np.array_equal(backend.to_host(array), np.arange(15.0).reshape(5, 3).T)
    empty = backend.empty((0,), dtype)
    backend.copy(empty, empty)


# -- order and cuts --------------------------------------------------------------------------------------------
@pytest.mark.bits
@every_dtype
def test_reduce_adds_in_the_order_given(backend: Backend, dtype: DType) -> None:
    rng = np.random.default_rng(2)
    for count in (1, 2, 3, 5):
        parts = [
            put(backend, rng.standard_normal((9, 8191)) * 10.0 ** rng.integers(-3, 4), dtype) for _ in range(count)
        ]
        total = backend.to_host(parts[0]).copy()
        for part in parts[1:]:
            total = total + backend.to_host(part)
        for op, wanted in (("sum", total), ("avg", total / count)):
            expected = bits(backend, put(backend, wanted, dtype))
            out = place(backend, (9, 8191), dtype)
            backend.reduce(parts, op, out)
            assert bits(backend, out) == expected
            for i in range(count):
                copies = [put(backend, backend.to_host(part), dtype) for part in parts]
                backend.reduce(copies, op, copies[i])
                assert bits(backend, copies[i]) == expected, f"{op} in place of part {i} of {count}"
        window = (slice(None), slice(100, 4200))
        out = place(backend, (9, 8191), dtype)
        backend.reduce([part[window] for part in parts], "sum", out[window])
        assert bits(backend, out[window]) == bits(backend, put(backend, total[window], dtype))


@pytest.mark.bits
@every_dtype
def test_a_slice_gets_the_bits_of_the_whole(backend: Backend, dtype: DType) -> None:
    rng, compute, size = np.random.default_rng(3), compute_dtype(dtype), 150_001
    values = [rng.standard_normal(size) for _ in range(3)] + [rng.random(size)]
    mask = place(backend, (size,), uint8)
    backend.dropout_mask((5, 6), 0.2, mask)

    def run(*cuts: int) -> list[bytes]:
        p, m, v = (put(backend, values[i], compute) for i in (0, 2, 3))
        g, x, out = put(backend, values[1], dtype), put(backend, values[0], dtype), place(backend, (6, size), dtype)
        for start, end in zip((0, *cuts), (*cuts, size), strict=True):
            s = slice(start, end)
            backend.adam(p[s], g[s], m[s], v[s], AdamStep(**ADAM, decoupled=True))
            backend.elementwise(Rule(SGD(0.9).rule, Now(0.1, 2, 0.01), 0.5), g[s], p[s], m[s])
            backend.reduce([x[s], g[s], x[s]], "avg", out[0, s])
            backend.copy(p[s], out[1, s])
            backend.add(x[s], g[s], out[2, s])
            backend.gelu(x[s], out[3, s])
            backend.gelu_backward(g[s], x[s], out[4, s])
            backend.dropout(x[s], mask[s], 0.8, out[5, s])
        return [bits(backend, a) for a in (p, m, v, out)]

    assert run() == run(1, 13, 40_000, 40_000, 111_111) == run(75_001)


@pytest.mark.bits
@every_dtype
def test_sum_squares(backend: Backend, dtype: DType) -> None:
    out = backend.empty((1,), fp64)
    for size in (0, 1, 8192, 8193, 100_003):
        array = put(backend, np.random.default_rng(size).standard_normal(size), dtype)
        exact = math.fsum(np.square(backend.to_host(array).astype(np.float64)))
        backend.sum_squares(array, size, out)
        first = float(backend.to_host(out)[0])
        assert first == pytest.approx(exact, rel=1e-13)
        for offset in range(1, 18):
            backend.sum_squares(put(backend, backend.to_host(array), dtype, offset=offset), size, out)
            assert float(backend.to_host(out)[0]) == first
    for poison in (np.inf, np.nan):
        array = put(backend, np.array([1.0, poison]), dtype)
        backend.sum_squares(array, 2, out)
        assert np.array_equal(backend.to_host(out), [poison], equal_nan=True)
    backend.sum_squares(put(backend, np.full(9, 3e38), fp32), 9, out)
    assert np.isfinite(backend.to_host(out)).all()  # no overflow: the squares are fp64


@pytest.mark.bits
@every_dtype
def test_sums_of_squares_by_runs_are_those_of_the_runs_alone(backend: Backend, dtype: DType) -> None:
    for size, length in ((30_001, 10_000), (10, 4), (8, 4), (1, 1), (20_000, 8192), (20_000, 20_000)):
        array, count = put(backend, np.random.default_rng(1).standard_normal(size), dtype), -(-size // length)
        runs, alone = backend.empty((count + 1,), fp64), backend.empty((1,), fp64)
        backend.sum_squares(array, length, runs)
        for index, total in enumerate(backend.to_host(runs)):
            part = array[index * length : (index + 1) * length]
            backend.sum_squares(part, max(part.size, 1), alone)  # only a run's length matters: the last is shorter
            assert backend.to_host(alone)[0] == total
        assert backend.to_host(runs)[count] == 0.0


@every_dtype
def test_finite_probe(backend: Backend, dtype: DType) -> None:
    """Whatever is finite counts as such, and one value that is not is found wherever it stands."""
    out = backend.empty((1,), fp64)
    largest = dtype.max if dtype is not fp64 else 1e150  # CUDA's is a sum of squares
    for size in (1, 7, 8193, 70_001):
        values = np.random.default_rng(size).standard_normal(size)
        values[:3] = [0.0, largest, -largest][:size]
        for offset in (0, 1, 3):
            array = put(backend, values, dtype, offset=offset)
            backend.finite_probe(array, out)
            assert backend.to_host(out)[0] == 0.0
            for place_of, poison in ((0, np.nan), (size // 2, np.inf), (size - 1, -np.inf)):
                spoiled = values.copy()
                spoiled[place_of] = poison
                backend.finite_probe(put(backend, spoiled, dtype, offset=offset), out)
                assert np.isnan(backend.to_host(out)[0])


# -- single kernels ----------------------------------------------------------------------------------------------
@every_dtype
def test_attention_sees_no_future(backend: Backend, dtype: DType) -> None:
    qkv = np.random.default_rng(4).standard_normal((2, 150, 24))
    outs = []
    for later in (0.0, 100.0):
        changed = qkv.copy()
        changed[:, 90:] += later
        sent = put(backend, changed, dtype)
        out, flash = (place(backend, (2, 150, 8), dtype) for _ in range(2))
        probs, lse = place(backend, (2, 4, 150, 150), dtype), place(backend, (2, 4, 150), compute_dtype(dtype))
        backend.attention(sent, Heads(4, 4), Probs(probs), out)
        assert not np.triu(backend.to_host(probs), 1).any()
        backend.flash_attention(sent, Heads(4, 4), Dropout(FLASH_KEY, 0.0), flash, lse)
        outs.append([bits(backend, a) for a in (out[:, :90], flash[:, :90], lse[:, :, :90])])
    assert outs[0] == outs[1]


@pytest.mark.bits
@every_dtype
@pytest.mark.parametrize(("num_heads", "kv"), [(4, 4), (6, 2)])
def test_a_kept_dropped_softmax_changes_no_bit(backend: Backend, dtype: DType, num_heads: int, kv: int) -> None:
    """It is softmax * mask, not divided yet: exactly what backward makes of the two where it is not kept."""
    rng = np.random.default_rng(7)
    shape, heads = (2, num_heads, 70, 70), Heads(num_heads, kv)
    qkv = put(backend, rng.standard_normal((2, 70, (num_heads + 2 * kv) * 8)), dtype)
    grad = put(backend, rng.standard_normal((2, 70, num_heads * 8)), dtype)
    mask = put(backend, (rng.random(shape) < 0.7).astype(np.uint8), uint8)
    probs, dropped, room = (place(backend, shape, dtype) for _ in range(3))
    out, plain, kept = (
        place(backend, grad.shape, dtype),
        place(backend, qkv.shape, dtype),
        place(backend, qkv.shape, dtype),
    )
    backend.attention(qkv, heads, Probs(probs, mask, 0.7, dropped), out)
    assert (backend.to_host(dropped) == backend.to_host(probs) * backend.to_host(mask)).all()
    backend.attention_backward(grad, qkv, heads, Probs(probs, mask, 0.7), room, plain)
    backend.attention_backward(grad, qkv, heads, Probs(probs, mask, 0.7, dropped), room, kept)
    assert bits(backend, plain) == bits(backend, kept)


@pytest.mark.bits
@every_dtype
def test_statistics_alone_are_the_norms(backend: Backend, dtype: DType) -> None:
    """Of layer_norm and of rms_norm, with rows short and long: CUDA has a kernel for each."""
    for rows, columns in ((3000, 48), (3, 5), (700, 129), (4, 1024), (3, 1025), (2, 16500)):
        x = put(backend, np.random.default_rng(8).standard_normal((rows, columns)), dtype)
        row, out = put(backend, np.ones(columns), dtype), place(backend, x.shape, dtype)
        with_norm, alone = ([place(backend, (rows,), compute_dtype(dtype)) for _ in range(2)] for _ in range(2))
        backend.layer_norm(x, row, row, 1e-5, out, *with_norm)
        backend.layer_norm_stats(x, 1e-5, *alone)
        assert [bits(backend, a) for a in with_norm] == [bits(backend, a) for a in alone]
        backend.rms_norm(x, row, 1e-5, out, with_norm[0])
        backend.rms_norm_stats(x, 1e-5, alone[0])
        assert bits(backend, with_norm[0]) == bits(backend, alone[0])


def test_layer_norm_backward_may_leave_out_dx(backend: Backend) -> None:
    case = next(c for c in CASES if c.name == "layer_norm_backward")
    before, (_, *wanted) = case.run(backend, fp32)
    inputs = [put(backend, x, fp32) for x in before]
    got = [place(backend, (48,), fp32) for _ in range(2)]
    backend.layer_norm_backward(*inputs, None, *got)
    assert [bits(backend, a) for a in got] == [bits(backend, a) for a in wanted]


def test_a_bad_gradient_spoils_its_own_embedding_only(backend: Backend) -> None:
    grad = np.ones((4, 3))
    grad[1] = np.inf, np.nan, 1
    dweight = place(backend, (5, 3), fp32)
    backend.embedding_backward(put(backend, grad, fp32), put(backend, np.array([2, 0, 2, 4]), int64), dweight)
    wanted = [[np.inf, np.nan, 1], [0] * 3, [2] * 3, [0] * 3, [1] * 3]
    assert np.array_equal(backend.to_host(dweight), wanted, equal_nan=True)


def philox_words(key: tuple[int, int], count: int) -> list[int]:
    """Philox-4x64-10 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"), spelled out."""
    words: list[int] = []
    full = 2**64 - 1
    for block in range(-(-count // 8)):
        (a, b, c, d), (k0, k1) = (block + 1, 0, 0, 0), key
        for _ in range(10):
            left, right = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
            a, b, c, d = (right >> 64) ^ b ^ k0, right & full, (left >> 64) ^ d ^ k1, left & full
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & full, (k1 + 0xBB67AE8584CAA73B) & full
        for word in (a, b, c, d):
            words += [word & 0xFFFFFFFF, word >> 32]
    return words[:count]


@pytest.mark.bits
def test_dropout_mask_is_the_philox_stream(backend: Backend) -> None:
    key, shape = (0x0123456789ABCDEF, 2**64 - 2), (7, 11, 13)
    for probability in (0.1, 0.5, 0.999):
        mask = place(backend, shape, uint8)
        backend.dropout_mask(key, probability, mask)
        threshold = round(probability * 2**32)
        wanted = np.array([word >= threshold for word in philox_words(key, mask.size)]).reshape(shape)
        assert np.array_equal(backend.to_host(mask), wanted)


def test_dropout_mask_statistics(backend: Backend) -> None:
    long, short = (place(backend, (size,), uint8) for size in (300_001, 1_003))
    backend.dropout_mask((1, 2), 0.3, long)
    backend.dropout_mask((1, 2), 0.3, short)
    kept = backend.to_host(long)
    assert np.array_equal(kept[:1_003], backend.to_host(short))  # a position's fate depends on nothing else
    assert set(np.unique(kept)) == {0, 1}
    assert abs(kept.mean() - 0.7) < 5 * math.sqrt(0.3 * 0.7 / kept.size)
    assert abs(np.corrcoef(kept[1:], kept[:-1])[0, 1]) < 5 / math.sqrt(kept.size)
    for other in ((1, 3), (2, 2)):
        backend.dropout_mask(other, 0.3, long)
        assert abs(np.corrcoef(kept, backend.to_host(long))[0, 1]) < 5 / math.sqrt(kept.size)
    for probability, value in ((0.0, 1), (1.0, 0)):
        backend.dropout_mask((1, 2), probability, long)
        assert (backend.to_host(long) == value).all()


# -- parts of a whole ----------------------------------------------------------------------------------------
@pytest.mark.bits
def test_a_window_of_a_mask_is_the_windows_of_the_whole(backend: Backend) -> None:
    """Runs that start and end anywhere among the 8 words of a counter, back to back, apart, or over each other."""
    key, probability = (7, 2**63 + 1), 0.4
    whole = place(backend, (5000,), uint8)
    backend.dropout_mask(key, probability, whole)
    expected = backend.to_host(whole)
    cases = [(first, run, run + gap, 3) for first in range(10) for run in (1, 3, 8, 13) for gap in (0, 1, 7)]
    cases += [(1, 1025, 1030, 4), (4096, 31, 0, 1), (4099, 16, 40, 9), (0, 5, 2, 6)]
    for first, run, stride, runs in cases:
        mask = place(backend, (runs, run), uint8, offset=first % 3)
        backend.dropout_mask(key, probability, mask, Window(first, run, stride))
        wanted = [expected[first + i * stride : first + i * stride + run] for i in range(runs)]
        assert np.array_equal(backend.to_host(mask), wanted), (first, run, stride)
    backend.dropout_mask(key, probability, place(backend, (0,), uint8), Window(3, 4, 5))


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_parts_of_a_table_add_up_to_the_whole(backend: Backend, dtype: DType) -> None:
    """Every id is some part's, whose row it gets; the others give zeros, whatever their rows hold."""
    random = np.random.default_rng(0)
    table, ids = random.standard_normal((11, 5)), random.integers(0, 11, (3, 7))
    stored, tokens = put(backend, table, dtype), put(backend, ids, int64)
    out = place(backend, (3, 7, 5), dtype)
    backend.embedding(tokens, stored, out)
    whole = backend.to_host(out).astype(np.float64)
    grad = put(backend, random.standard_normal((3, 7, 5)), dtype)
    dtable = place(backend, (11, 5), dtype)
    backend.embedding_backward(grad, tokens, dtable)
    total, rows = np.zeros_like(whole), []
    for first, stop in ((0, 4), (4, 5), (5, 9), (9, 11), (11, 13)):  # the last one is padding
        part = np.full((stop - first, 5), np.nan)
        part[: max(0, min(stop, 11) - first)] = table[first:stop]
        backend.embedding(tokens, put(backend, part, dtype), out, first)
        own = backend.to_host(out).astype(np.float64)
        assert np.array_equal(own[(ids < first) | (ids >= stop)], np.zeros_like(own)[(ids < first) | (ids >= stop)])
        total += own
        dpart = place(backend, (stop - first, 5), dtype)
        backend.embedding_backward(grad, tokens, dpart, first)
        rows.append(backend.to_host(dpart))
    assert np.array_equal(total, whole)
    assert np.array_equal(np.concatenate(rows)[:11], backend.to_host(dtable))
    assert not np.concatenate(rows)[11:].any()


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_shares_of_a_cross_entropy_are_those_of_the_whole(backend: Backend, dtype: DType) -> None:
    """Sums of exponentials below a top, the target's logit, and columns of the gradient, part by part."""
    random, compute = np.random.default_rng(1), compute_dtype(dtype)
    logits, targets = 3 * random.standard_normal((6, 10)), random.integers(0, 10, 6)
    logits[2] += 900  # exp of it overflows: only less the top of all columns it does not
    stored, ids = put(backend, logits, dtype), put(backend, targets, int64)
    logits = backend.to_host(stored).astype(np.float64)
    top = put(backend, logits.max(1), compute)
    losses, lse, dlogits = (
        place(backend, shape, t) for shape, t in (((6,), compute), ((6,), compute), ((6, 10), dtype))
    )
    backend.cross_entropy(stored, ids, losses, lse)
    backend.cross_entropy_backward(stored, ids, lse, 2.0, 7, dlogits)
    sums, picked, columns = np.zeros(6), np.zeros(6), []
    for first, stop in ((0, 3), (3, 4), (4, 10), (10, 10)):
        mine = stored[:, first:stop]
        share, found = place(backend, (6,), compute, offset=1), place(backend, (6,), compute)
        backend.cross_entropy_shares(mine, ids, first, top, share, found)
        sums += backend.to_host(share)
        here = (targets >= first) & (targets < stop)
        assert np.array_equal(backend.to_host(found), np.where(here, logits[np.arange(6), targets], 0.0))
        picked += backend.to_host(found)
        dmine = place(backend, (6, stop - first), dtype)
        backend.cross_entropy_backward(mine, ids, lse, 2.0, 7, dmine, first)
        columns.append(backend.to_host(dmine).astype(np.float64))
    off = 16 * compute.eps
    np.testing.assert_allclose(sums, np.exp(logits - logits.max(1, keepdims=True)).sum(1), rtol=off, atol=0)
    assert np.array_equal(picked, logits[np.arange(6), targets])
    found = np.log(sums) + logits.max(1) - picked
    np.testing.assert_allclose(found, backend.to_host(losses), rtol=off, atol=off * 1000)
    assert np.array_equal(np.concatenate(columns, axis=1), backend.to_host(dlogits).astype(np.float64))


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_some_heads_drop_what_the_whole_drops(backend: Backend, dtype: DType) -> None:
    """Flash attention of heads 2 and 3 of 4, two sequences: its masks are those of the whole's heads."""
    random, dropout = np.random.default_rng(2), Dropout((5, 6), 0.5)
    d, tokens = 3, 9
    q, k, v = (random.standard_normal((2, tokens, 4, d)) for _ in range(3))

    def packed_heads(heads: slice) -> Values:
        return np.concatenate([x[:, :, heads].reshape(2, tokens, -1) for x in (q, k, v)], axis=-1)

    def run(heads: slice, n: Heads) -> Any:
        qkv = put(backend, packed_heads(heads), dtype)
        out = place(backend, (2, tokens, n.queries * d), dtype)
        lse, delta = (place(backend, (2, n.queries, tokens), compute_dtype(dtype)) for _ in range(2))
        backend.flash_attention(qkv, n, dropout, out, lse)
        dqkv = place(backend, qkv.shape, dtype)
        backend.flash_attention_backward(out, qkv, n, dropout, out, lse, delta, dqkv)
        shape = (2, tokens, -1, n.queries, d)
        return [backend.to_host(x).reshape(shape).astype(np.float64) for x in (out, dqkv)]

    whole, part = run(slice(0, 4), Heads(4, 4)), run(slice(2, 4), Heads(2, 2, 2, 4))
    other = run(slice(2, 4), Heads(2, 2))
    for ours, theirs, first in zip(part, whole, other, strict=True):
        np.testing.assert_allclose(ours, theirs[..., 2:4, :], rtol=0, atol=64 * dtype.eps)
        assert np.abs(first - ours).max() > 1e-2  # the first heads' masks are others


def test_nothing_is_something_too(backend: Backend) -> None:
    """A rank beyond the last parameter owns an empty shard."""
    p, g, m, v = (backend.empty((0,), fp32) for _ in range(4))
    backend.adam(p, g, m, v, AdamStep(**ADAM, decoupled=True))
    backend.elementwise(Rule(SGD(0.9).rule, Now(0.1, 1, 0.01), 0.5), g, p, m)
    backend.reduce([p, g], "avg", m)
    backend.add(p, g, m)
    x, weight, stats = (backend.empty(shape, fp32) for shape in ((0, 4), (4,), (0,)))
    backend.rms_norm(x, weight, 1e-5, x, stats)
    backend.rms_norm_backward(x, x, weight, stats, x, weight)
    assert not backend.to_host(weight).any()
    backend.swiglu(x, backend.empty((0, 2), fp32))
