"""CUDA kernels against NumPy's: arrays, primitives, fused layers, tokens, sums and optimizers.

`import cupy` is the real one where a GPU is, and the stand-in of tests/standin otherwise, which compiles the very
same sources with g++ and runs them. Where IEEE 754 rounds every step (+ - * / sqrt, casts) the results must be
NumPy's bits; exp, log and tanh, and sums, whose order differs, are held to a few units in the last place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import cupy as cp
import numpy as np
import pytest

from zerosim.backends.cuda.backend import CudaBackend
from zerosim.backends.cuda.host import Transfers
from zerosim.backends.kernels import AdamStep, Coded, Rule, Storing
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.device.device import Device, Kind
from zerosim.dtypes import FLOATING, DType, bf16, compute_dtype, fp16, fp32, fp64, int64, uint8
from zerosim.optim.adafactor import Adafactor, AdafactorHF, inverse_root
from zerosim.optim.adagrad import AdaGrad, RMSProp
from zerosim.optim.adam import Adam
from zerosim.optim.elementwise import Elementwise, Now
from zerosim.optim.factored import Average, Estimate, add_to, outer, square
from zerosim.optim.lion import Lion
from zerosim.optim.muon import Muon
from zerosim.optim.optimizer import Step
from zerosim.optim.pieces import LocalPiece
from zerosim.optim.radam import RAdam
from zerosim.optim.sage import AdamSAGE
from zerosim.optim.sgd import SGD
from zerosim.optim.sophia import SophiaG
from zerosim.placement.spec import WeightSpec

NUMPY, CUDA = NumpyBackend(), CudaBackend()
STANDIN = getattr(cp, "standin", None) if "standin" in (cp.__file__ or "") else None
SHAPES = [(), (1,), (7,), (0,), (3, 0), (5, 33), (2, 3, 4)]

floating = pytest.mark.parametrize("dtype", FLOATING, ids=str)


@pytest.fixture(autouse=True)
def _stream() -> Iterator[None]:
    """Each test in a stream of its own, as ranks are."""
    with cp.cuda.Device(0), cp.cuda.Stream(non_blocking=True):
        yield


def draw(shape: tuple[int, ...], seed: int = 0) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def place(backend: Any, values: Any, dtype: DType, layout: str = "whole") -> Any:
    """The values as an array of that backend: whole, every second column of a wider one, or transposed."""
    values = np.asarray(values)
    if layout == "whole" or not values.ndim:
        array = backend.empty(values.shape, dtype)
    elif layout == "columns":
        array = backend.empty((*values.shape[:-1], 2 * values.shape[-1]), dtype)[..., ::2]
    else:
        array = backend.empty(values.shape[::-1], dtype).transpose()
    backend.from_host(values, array)
    return array


def run(
    call: Callable[..., None], inputs: list[Any], outputs: list[Any], layout: str = "whole"
) -> list[tuple[Any, Any]]:
    """call(backend, *inputs, *outputs) on both backends; (CUDA's, NumPy's) values of each output.

    An input is (values, dtype); an output (shape, dtype), which holds 77 before. None stands for itself.
    """
    results = []
    for backend in (CUDA, NUMPY):
        given = [None if item is None else place(backend, *item, layout) for item in inputs]
        made = [None if item is None else place(backend, np.full(item[0], 77), item[1], layout) for item in outputs]
        call(backend, *given, *made)
        results.append([None if array is None else backend.to_host(array) for array in made])
    return list(zip(*results, strict=True))


def same(pair: tuple[Any, Any]) -> None:
    """The same values, types and shapes; any nan equals any other."""
    got, want = pair
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def near(pair: tuple[Any, Any], dtype: DType, ulps: float = 1.0, scale: Any = 0.0) -> None:
    """Within `ulps` of the stored type, and 8 of the compute type on the scale of what was added or cancelled.

    CuPy flushes subnormal float32 values to zero, so the smallest normal number is allowed besides.
    """
    got, want = (np.asarray(values, np.float64) for values in pair)
    assert pair[0].dtype == pair[1].dtype
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    got, want, scale = got[finite], want[finite], np.broadcast_to(scale, want.shape)[finite]
    tiny = dtype.min_normal * (dtype.eps if dtype is fp16 else 1.0)
    limit = ulps * dtype.eps * np.abs(want) + 8 * compute_dtype(dtype).eps * scale + tiny
    assert np.all(np.abs(got - want) <= limit), float(np.max(np.abs(got - want) / limit))


# -- arrays -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["whole", "columns", "transposed"])
@pytest.mark.parametrize("dtype", [*FLOATING, int64, uint8], ids=str)
def test_a_round_trip_rounds_as_numpy_does(dtype: DType, layout: str) -> None:
    for shape in SHAPES:
        values = draw(shape) * 1e-3 if dtype.floating else np.abs(draw(shape) * 50)
        [pair] = run(lambda b, x, out: b.copy(x, out), [(values, dtype)], [(shape, dtype)], layout)
        same(pair)


def test_what_is_read_back_is_a_new_array() -> None:
    array = place(CUDA, [1.0, 2.0], fp32)
    first = CUDA.to_host(array)
    first[:] = 5
    assert CUDA.to_host(array).tolist() == [1.0, 2.0]


def test_values_asked_for_later_are_those_of_the_moment_of_asking() -> None:
    array = place(CUDA, np.arange(1000), bf16)
    later = CUDA.to_host_later(array)
    CUDA.fill(array, 3.0)
    assert later().tolist() == NUMPY.to_host(place(NUMPY, np.arange(1000), bf16)).tolist()
    assert later().dtype == np.float32
    assert CUDA.to_host(array).tolist() == [3.0] * 1000


def test_many_uploads_under_way_keep_their_values() -> None:
    arrays = [CUDA.empty((257,), fp32) for _ in range(50)]
    for value, array in enumerate(arrays):
        CUDA.from_host(np.full(257, value), array)
    for value, array in enumerate(arrays):
        assert CUDA.to_host(array).tolist() == [value] * 257


@pytest.mark.skipif(STANDIN is None, reason="on a GPU the copies may be done at once")
def test_pinned_blocks_are_held_until_their_copies_are_done() -> None:
    """CuPy's pool would hand them out again: what is under way would read, or write, someone else's bytes."""
    transfers, array = Transfers(), CUDA.empty((257,), fp32)
    transfers.from_host(np.ones(257), array)
    transfers.to_host_later(array)  # and the function dropped
    transfers.from_host(np.ones(257), array)
    assert [nbytes for _, _, nbytes in transfers._held] == [1028] * 3
    cp.cuda.get_current_stream().synchronize()
    transfers.from_host(np.ones(257), array)
    assert len(transfers._held) == 1


def test_uploads_beyond_a_bound_wait_for_those_before() -> None:
    transfers = Transfers(most_bytes=5000)
    arrays = [CUDA.empty((257,), fp32) for _ in range(9)]
    for value, array in enumerate(arrays):
        transfers.from_host(np.full(257, value), array)
        assert sum(nbytes for *_, nbytes in transfers._held) <= 5000
    for value, array in enumerate(arrays):
        assert transfers.to_host(array).tolist() == [value] * 257


@pytest.mark.parametrize("layout", ["whole", "columns"])
@pytest.mark.parametrize("dtype", [*FLOATING, int64, uint8], ids=str)
def test_fill(dtype: DType, layout: str) -> None:
    for value in (0.0, 3.0, *((0.1, float("inf"), float("nan"), 1e5) if dtype.floating else ())):
        for shape in SHAPES:
            [pair] = run(lambda b, out, value=value: b.fill(out, value), [], [(shape, dtype)], layout)
            same(pair)


@pytest.mark.parametrize("target", [*FLOATING], ids=str)
@pytest.mark.parametrize("source", [*FLOATING, uint8], ids=str)
def test_copy_rounds_once(source: DType, target: DType) -> None:
    """1 + half an ulp + a trifle goes up in one rounding, and would go down in two (by way of float32)."""
    values = [1 + 2**-11 + 2**-40, 1 + 2**-8 + 2**-30, -1 - 2**-8 - 2**-40, 65519.99999999, 65520.0, 3e38, 1e39, 0.1]
    values += [2**-25 + 2**-60, 2**-14 - 2**-26, float("inf"), float("nan"), -0.0, 3.3961775292304600e38, 2.0]
    given = np.abs(np.nan_to_num(values, posinf=9, nan=7)).clip(0, 200) if source is uint8 else values
    for layout in ("whole", "columns"):
        same(run(lambda b, x, out: b.copy(x, out), [(given, source)], [((15,), target)], layout)[0])


# -- primitives ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["whole", "columns", "transposed"])
@pytest.mark.parametrize("op", ["add", "subtract", "multiply", "divide"])
@floating
def test_arithmetic_has_numpys_bits(dtype: DType, op: str, layout: str) -> None:
    call = lambda b, x, y, out: getattr(b, op)(x, y, out)  # noqa: E731
    for left, right in (((5, 33), (5, 33)), ((5, 33), (33,)), ((5, 1), (1, 33)), ((2, 3, 4), ()), ((0, 4), (4,))):
        shape = np.broadcast_shapes(left, right)
        for out in (dtype, fp32):
            same(run(call, [(draw(left), dtype), (draw(right, 1), dtype)], [(shape, out)], layout)[0])


@pytest.mark.parametrize("op", ["add", "subtract", "multiply", "divide"])
@floating
def test_arithmetic_with_a_number_and_in_place(dtype: DType, op: str) -> None:
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 60000.0])
    for number in (0.1, 0.0, 3, float("inf")):
        same(run(lambda b, x, out, n=number: getattr(b, op)(x, n, out), [(special, dtype)], [((7,), dtype)])[0])
    for backend in (CUDA, NUMPY):
        x, y = place(backend, draw((40,)), dtype), place(backend, draw((40,), 1), dtype)
        getattr(backend, op)(x, y, x)
        kept = backend.to_host(x) if backend is CUDA else kept  # noqa: F821
    same((kept, backend.to_host(x)))


@pytest.mark.parametrize("op", ["exp", "log", "sqrt", "tanh"])
@floating
def test_functions(dtype: DType, op: str) -> None:
    values = np.array([*np.linspace(-9, 9, 101), np.inf, -np.inf, np.nan, 0.0])
    for layout in ("whole", "columns"):
        [pair] = run(lambda b, x, out: getattr(b, op)(x, out), [(values, dtype)], [((105,), dtype)], layout)
        near(pair, dtype, ulps=0 if op == "sqrt" else 1 if dtype.is_half else 4)


@pytest.mark.parametrize("op", ["sum_to", "max_to"])
@floating
def test_reductions_undo_broadcasting(dtype: DType, op: str) -> None:
    cases = [((3, 5), ()), ((3, 5), (5,)), ((3, 5), (3, 1)), ((2, 3, 4), (3, 1)), ((2, 3, 4), (1, 3, 1)), ((4,), (4,))]
    cases += [((40, 33), (33,)), ((2, 3000), (2, 1)), ((1, 5), (5,)), ((7, 2, 5), (2, 1))]
    for shape, target in cases:
        for layout in ("whole", "transposed"):
            values = draw(shape)
            [pair] = run(lambda b, x, out: getattr(b, op)(x, out), [(values, dtype)], [(target, dtype)], layout)
            near(pair, dtype, 1, scale=0 if op == "max_to" else np.abs(values).sum())


# -- fused layers -------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (7, 5), (128, 3), (129, 64), (700, 40), (40000, 2), (0, 4), (3, 0)])
@floating
def test_column_sum(dtype: DType, shape: tuple[int, int]) -> None:
    values = draw(shape)
    for layout in ("whole", "columns"):
        [pair] = run(lambda b, x, out: b.column_sum(x, out), [(values, dtype)], [(shape[1:], dtype)], layout)
        near(pair, dtype, 1, scale=np.abs(values).sum(0))


ROWS = [(1, 1), (3, 5), (5, 32), (6, 100), (70, 33), (4, 1024), (3, 1025), (2, 16500), (0, 8)]


@pytest.mark.parametrize("shape", ROWS, ids=str)
@floating
def test_layer_norm(dtype: DType, shape: tuple[int, int]) -> None:
    (rows, columns), wide = shape, compute_dtype(dtype)
    inputs = [(draw(shape) + 1, dtype), (draw((columns,), 1), dtype), (draw((columns,), 2), dtype)]
    outputs = [(shape, dtype), ((rows,), wide), ((rows,), wide)]

    def call(b: Any, x: Any, weight: Any, bias: Any, out: Any, mean: Any, rstd: Any) -> None:
        b.layer_norm(x, weight, bias, 1e-5, out, mean, rstd)

    out, mean, rstd = run(call, inputs, outputs)
    near(mean, wide, 4, scale=2)
    near(rstd, wide, 16)
    near(out, dtype, 1, scale=8 * (1 if columns > 1 else 300))
    for layout in ("columns", "transposed"):
        x, target = place(CUDA, inputs[0][0], dtype, layout), place(CUDA, np.zeros(shape), dtype, layout)
        others = [place(CUDA, *item) for item in inputs[1:]]
        CUDA.layer_norm(x, *others, 1e-5, target, *(CUDA.empty((rows,), wide) for _ in range(2)))
        np.testing.assert_array_equal(CUDA.to_host(target), out[0])


def test_a_row_of_layer_norm_does_not_depend_on_its_neighbours() -> None:
    for columns in (100, 2000):
        outputs = []
        for rows in (1, 5):
            x, ones = place(CUDA, draw((5, columns))[-rows:], bf16), place(CUDA, np.ones(columns), bf16)
            out, stats = CUDA.empty((rows, columns), bf16), [CUDA.empty((rows,), fp32) for _ in range(2)]
            CUDA.layer_norm(x, ones, ones, 1e-5, out, *stats)
            outputs.append(CUDA.to_host(out)[-1])
        assert np.array_equal(*outputs)


@pytest.mark.parametrize("shape", ROWS, ids=str)
@floating
def test_layer_norm_backward(dtype: DType, shape: tuple[int, int]) -> None:
    columns, wide = shape[1], compute_dtype(dtype)
    x = draw(shape)
    mean, rstd = x.mean(1), 1 / np.sqrt(x.var(1) + 0.1)
    inputs = [(draw(shape, 1), dtype), (x, dtype), (draw((columns,), 2), dtype), (mean, wide), (rstd, wide)]
    parts = [((columns,), dtype), ((columns,), dtype)]
    call = lambda b, *arrays: b.layer_norm_backward(*arrays)  # noqa: E731
    dx, dweight, dbias = run(call, inputs, [(shape, dtype), *parts])
    near(dx, dtype, 1, scale=32)
    near(dweight, dtype, 1, scale=2 * np.abs(inputs[0][0] * (x - mean[:, None]) * rstd[:, None]).sum(0) + 1)
    near(dbias, dtype, 1, scale=np.abs(inputs[0][0]).sum(0) + 1)
    nothing, dweight_alone, dbias_alone = run(call, inputs, [None, *parts])
    assert nothing == (None, None)
    same((dweight_alone[0], dweight[0]))
    same((dbias_alone[0], dbias[0]))


EXTREMES = np.array([*np.linspace(-12, 12, 201), -80, 80, -3e4, 3e4, np.inf, np.nan, 0.0])


@pytest.mark.parametrize("layout", ["whole", "columns"])
@floating
def test_gelu(dtype: DType, layout: str) -> None:
    [pair] = run(lambda b, x, out: b.gelu(x, out), [(EXTREMES, dtype)], [(EXTREMES.shape, dtype)], layout)
    # exp's argument is some 100 at the ends, where a relative error of eps becomes one of 100 eps in exp's result.
    near(pair, dtype, ulps=1 if dtype.is_half else 256)
    grad = draw(EXTREMES.shape)
    call = lambda b, g, x, dx: b.gelu_backward(g, x, dx)  # noqa: E731
    [pair] = run(call, [(grad, dtype), (EXTREMES, dtype)], [(EXTREMES.shape, dtype)], layout)
    near(pair, dtype, ulps=1 if dtype.is_half else 256, scale=4)


@pytest.mark.parametrize("layout", ["whole", "columns", "transposed"])
@floating
def test_dropout_has_numpys_bits(dtype: DType, layout: str) -> None:
    mask = np.arange(5 * 33).reshape(5, 33) % 3 > 0
    inputs = [(draw((5, 33)), dtype), (mask, uint8)]
    same(run(lambda b, x, m, out: b.dropout(x, m, 0.7, out), inputs, [((5, 33), dtype)], layout)[0])


def test_the_dropout_mask_may_begin_anywhere_in_memory() -> None:
    for first in range(9):
        for backend in (CUDA, NUMPY):
            room = place(backend, np.full(200, 9), uint8)
            backend.dropout_mask((3, 4), 0.3, room[first : first + 150])
            found = backend.to_host(room) if backend is CUDA else found  # noqa: F821
        same((found, backend.to_host(room)))


# -- tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocabulary", "columns"), [(1, 1), (5, 33), (40, 130), (50257, 3)])
@floating
def test_embedding_backward_adds_in_the_tokens_order(dtype: DType, vocabulary: int, columns: int) -> None:
    """The very bits of a plain loop over the tokens."""
    for tokens in (0, 1, 31, 100):
        ids = np.random.default_rng(tokens).integers(0, vocabulary, tokens)
        grad, dweight = place(CUDA, draw((tokens, columns)), dtype), CUDA.empty((vocabulary, columns), dtype)
        CUDA.fill(dweight, 77.0)
        CUDA.embedding_backward(grad, place(CUDA, ids, int64), dweight)
        sums = np.zeros((vocabulary, columns), np.float64 if dtype is fp64 else np.float32)
        for token, values in zip(ids, CUDA.to_host(grad), strict=True):
            sums[token] += values
        want = NUMPY.to_host(place(NUMPY, sums, dtype))
        same((CUDA.to_host(dweight), want))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (5, 32), (9, 1000), (3, 1500), (2, 50257), (0, 5)], ids=str)
@floating
def test_cross_entropy(dtype: DType, shape: tuple[int, int]) -> None:
    (rows, columns), wide = shape, compute_dtype(dtype)
    logits = 4 * draw(shape)
    targets = np.resize([0, columns - 1, columns // 2, -1], rows)  # a negative one: not predicted
    inputs = [(logits, dtype), (targets, int64)]
    outputs = [((rows,), wide), ((rows,), wide)]
    losses, lse = run(lambda b, x, t, loss, lse: b.cross_entropy(x, t, loss, lse), inputs, outputs)
    near(lse, wide, 4, scale=4)
    near(losses, wide, 4, scale=16)
    call = lambda b, x, t, lse, out: b.cross_entropy_backward(x, t, lse, 0.37, 7, out)  # noqa: E731
    for layout in ("whole", "columns"):
        [pair] = run(call, [*inputs, (lse[1], wide)], [(shape, dtype)], layout)
        # exp(logit - lse): an argument of up to some 30, whose rounding error exp turns into a relative one.
        near(pair, dtype, 1 if dtype.is_half else 32, scale=0.05)


def test_cross_entropy_of_inf_and_nan() -> None:
    for columns in (6, 1500):
        logits = draw((5, columns))
        logits[0, 3], logits[1, 2], logits[2], logits[3, 1] = np.nan, np.inf, -np.inf, -np.inf
        logits[4] = 1e30
        inputs = [(logits, fp32), ([1, 0, 2, 1, 5], int64)]
        losses, lse = run(lambda b, x, t, loss, e: b.cross_entropy(x, t, loss, e), inputs, [((5,), fp32), ((5,), fp32)])
        near(losses, fp32, 4)
        near(lse, fp32, 4)
        assert np.isnan(lse[0][:3]).all()
        assert np.isposinf(losses[0][3])


@pytest.mark.parametrize("shape", [(1, 1), (9, 40), (70, 1000), (7, 1500), (3, 20000), (0, 5)], ids=str)
@floating
def test_labels_are_numpys(dtype: DType, shape: tuple[int, int]) -> None:
    """Sums are added in another order, and exp may round otherwise: a label at the edge of rounding could differ."""
    for key, first in (((0, 0), 0), ((12345, 2**64 - 1), 4 * 10**9 + 3)):
        call = lambda b, x, out, k=key, f=first: b.sample_labels(x, k, f, out)  # noqa: E731
        for layout in ("whole", "columns"):
            same(run(call, [(4 * draw(shape), dtype)], [(shape[:1], int64)], layout)[0])


def test_labels_of_inf_and_nan_are_columns() -> None:
    for columns in (6, 1500):
        logits = draw((4, columns))
        logits[0, 3], logits[1, 2], logits[2], logits[3, 1:] = np.nan, np.inf, -np.inf, -np.inf
        [(got, want)] = run(lambda b, x, out: b.sample_labels(x, (1, 2), 0, out), [(logits, fp32)], [((4,), int64)])
        assert got[3] == want[3] == 0
        assert ((got >= 0) & (got < columns)).all()


def test_cross_entropy_divides_by_the_count() -> None:
    """exp(0 - 0) * 5 / 49, rounded as a division: a product with 1 / 49 would be another number."""
    want = np.float32(5) / np.float32(49)
    assert want != np.float32(5) * (np.float32(1) / np.float32(49))
    inputs = [(np.zeros((1, 2)), fp32), ([0], int64), ([0.0], fp32)]
    call = lambda b, x, t, lse, out: b.cross_entropy_backward(x, t, lse, 5.0, 49, out)  # noqa: E731
    [(got, _)] = run(call, inputs, [((1, 2), fp32)])
    assert got[0].tolist() == [0.0, want]


# -- sums over ranks, norms, optimizers ---------------------------------------------------------------
@pytest.mark.parametrize(("ranks", "op"), [(1, "avg"), (9, "sum"), (9, "max"), (15, "sum"), (16, "avg")])
@floating
def test_reduce_has_numpys_bits(dtype: DType, op: str, ranks: int) -> None:
    """Eight go into a launch; 1, 2, 3 and 5 of them are test_backends.py's."""
    for size in (0, 37):
        for layout in ("whole", "columns"):
            parts = [(draw((size,), rank), dtype) for rank in range(ranks)]
            call = lambda b, *arrays: b.reduce(arrays[:-1], op, arrays[-1])  # noqa: E731
            for out in (dtype, compute_dtype(dtype)):
                same(run(call, parts, [((size,), out)], layout)[0])


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_reduce_in_place_into_any_part(dtype: DType) -> None:
    for ranks in (2, 5, 11):
        for own in range(ranks):
            for backend in (CUDA, NUMPY):
                parts = [place(backend, draw((50,), rank), dtype) for rank in range(ranks)]
                backend.reduce(parts, "avg", parts[own])
                found = backend.to_host(parts[own]) if backend is CUDA else found  # noqa: F821
            same((found, backend.to_host(parts[own])))


def test_the_maximum_over_ranks_keeps_nan() -> None:
    parts = [([1.0, np.nan, 2.0, -np.inf], fp32), ([np.nan, 1.0, 3.0, -1.0], fp32)]
    same(run(lambda b, x, y, out: b.reduce([x, y], "max", out), parts, [((4,), fp32)])[0])


@pytest.fixture
def _two_gpus() -> Iterator[None]:
    """The stand-in has as many as are asked for."""
    before = cp.cuda.runtime.getDeviceCount()
    if STANDIN is not None:
        STANDIN.set_device_count(2)
    elif before < 2:
        pytest.skip("needs two GPUs")
    yield
    if STANDIN is not None:
        STANDIN.set_device_count(before)


@pytest.mark.usefixtures("_two_gpus")
def test_arrays_of_another_gpu_are_copied_over_first() -> None:
    with cp.cuda.Device(1), cp.cuda.Stream(non_blocking=True):
        far = place(CUDA, draw((60,)), fp32)
        there = cp.cuda.Event(disable_timing=True)
        there.record(cp.cuda.get_current_stream())
    cp.cuda.get_current_stream().wait_event(there)
    out, half = CUDA.empty((60,), fp32), CUDA.empty((20,), fp16)
    CUDA.copy(far, out)
    CUDA.copy(far[::3], half)
    want = draw((60,)).astype(np.float32)
    same((CUDA.to_host(out), want))
    same((CUDA.to_host(half), want[::3].astype(np.float16).astype(np.float32)))
    CUDA.reduce([out, far], "sum", out)
    same((CUDA.to_host(out), want + want))


def states(backend: Any, size: int, dtype: DType, half: DType) -> list[Any]:
    values = [draw((size,), 1), draw((size,), 2), draw((size,), 3), draw((size,), 4) ** 2]
    types = (dtype, half, dtype, dtype)
    return [place(backend, *item) for item in zip(values, types, strict=True)]


@pytest.mark.parametrize(("decoupled", "weight_decay"), [(True, 0.0), (True, 0.1), (False, 0.0), (False, 0.1)])
@pytest.mark.parametrize(("dtype", "half"), [(fp32, fp32), (fp64, fp64), (fp32, bf16), (fp32, fp16), (fp64, fp32)])
def test_adam_has_numpys_bits_and_a_slice_the_wholes(
    dtype: DType, half: DType, decoupled: bool, weight_decay: float
) -> None:
    hyper = AdamStep(1 / 3, 3e-3, 0.9, 0.95, 1e-8, weight_decay, decoupled, step=3)
    for size in (0, 1, 1000):
        whole, cut, numpys = (states(b, size, dtype, half) for b in (CUDA, CUDA, NUMPY))
        CUDA.adam(*whole, hyper)
        NUMPY.adam(*numpys, hyper)
        for part in (slice(0, 333), slice(333, 1000)):
            CUDA.adam(*(array[part] for array in cut), hyper)
        for mine, sliced, numpy in zip(whole, cut, numpys, strict=True):
            same((CUDA.to_host(mine), NUMPY.to_host(numpy)))
            same((CUDA.to_host(mine), CUDA.to_host(sliced)))


@pytest.mark.parametrize(("dtype", "half"), [(fp32, fp32), (fp64, fp64), (fp32, bf16), (fp32, fp16)])
def test_adam8bit_has_numpys_bits_and_blocks_the_wholes(dtype: DType, half: DType) -> None:
    hyper, size = AdamStep(1 / 3, 3e-3, 0.9, 0.95, 1e-8, 0.1, True, step=3), 1000
    results = []
    for backend, cuts in ((NUMPY, [0, size]), (CUDA, [0, size]), (CUDA, [0, 256, 768, size])):
        param, grad = place(backend, draw((size,), 1), dtype), place(backend, draw((size,), 2), half)
        codes = [place(backend, np.random.default_rng(i).integers(0, 256, size), uint8) for i in range(2)]
        scales = [place(backend, np.abs(draw((4,), 3 + i)), fp32) for i in range(2)]
        for start, stop in pairwise(cuts):
            here, blocks = slice(start, stop), slice(start // 256, -(-stop // 256))
            kept = [Coded(code[here], scale[blocks]) for code, scale in zip(codes, scales, strict=True)]
            backend.adam8bit(param[here], grad[here], *kept, hyper)
        results.append([backend.to_host(array) for array in (param, *codes, *scales)])
    for numpys, whole, cut in zip(*results, strict=True):
        same((whole, numpys))
        same((cut, numpys))


@pytest.mark.parametrize("kind", ["nearest", "stochastic", "kahan"])
def test_adam8bit_without_masters_has_numpys_bits(kind: str) -> None:
    hyper, size, results = AdamStep(1 / 3, 3e-3, 0.9, 0.95, 1e-8, 0.1, True, step=3), 1000, []
    adam = Adam(0.9, 0.95, 1e-8, 0.1, decoupled=True)
    for backend in (NUMPY, CUDA):
        param, grad, kept = (place(backend, draw((size,), i), bf16) for i in (1, 2, 5))
        lost, codes = place(backend, np.zeros(2), fp64), np.random.default_rng(0).integers(0, 256, (2, size))
        states = [Coded(place(backend, each, uint8), place(backend, np.abs(draw((4,), 3)), fp32)) for each in codes]
        storing = Storing(kind, (1, 2), 5, kept if kind == "kahan" else None, lost)
        stored = Rule(adam.rule, Now(hyper.lr, hyper.step, 0.1), hyper.grad_scale), storing
        backend.adam8bit(param, grad, *states, hyper, stored)
        results.append([backend.to_host(array) for array in (param, kept, lost, *states[0], *states[1])])
    for numpys, cudas in zip(*results, strict=True):
        same((cudas, numpys))


RULES: list[Elementwise] = [
    SGD(weight_decay=0.1), SGD(0.9), SGD(0.9, 0.1, nesterov=True), SGD(0.9, ema=True), AdaGrad(weight_decay=0.1),
    RMSProp(), RAdam(weight_decay=0.1), Lion(weight_decay=0.1), AdamSAGE(weight_decay=0.1), SophiaG(64),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(("dtype", "half"), [(fp32, fp32), (fp64, fp64), (fp32, bf16), (fp32, fp16)])
def test_element_wise_rules_have_numpys_bits(dtype: DType, half: DType, rule: Elementwise) -> None:
    for step in (1, 7):
        results = []
        for backend in (CUDA, NUMPY):
            param, grad, *_ = states(backend, 500, dtype, half)
            kept = [place(backend, draw((500,), 3 + i) ** 2, dtype) for i in range(len(rule.states))]
            backend.elementwise(Rule(rule.rule, Now(0.01, step, rule.weight_decay), 0.3), grad, param, *kept)
            results.append([backend.to_host(array) for array in (param, *kept)])
        for pair in zip(*results, strict=True):
            same(pair)


@pytest.mark.parametrize("kind", ["nearest", "stochastic", "kahan"])
@pytest.mark.parametrize("rule", [Adam(weight_decay=0.1), RAdam(weight_decay=0.1), Lion()], ids=repr)
def test_weights_stored_in_bf16_have_numpys_bits(rule: Elementwise, kind: str) -> None:
    """Cuts that share a counter of the stream; what was lost is counted alike, by one block of threads or two."""
    numel, first = 333 + 4093, 100_007  # the second part's last element is a 257th thread's
    results = []
    for backend, cuts in ((CUDA, (0, 333, numel)), (NUMPY, (0, numel))):
        param, c = place(backend, draw((numel,), 0), bf16), place(backend, np.zeros(numel), bf16)
        kept = [place(backend, draw((numel,), 2 + i) ** 2, bf16) for i in range(len(rule.states))]
        grad, lost = place(backend, draw((numel,), 1) ** 9, fp32), np.zeros(2)
        for step in (1, 2):
            counter = place(backend, np.zeros(2), fp64)
            for at in map(slice, cuts[:-1], cuts[1:]):
                storing = Storing(kind, (2**64 - 5, 9), first + at.start, c[at] if kind == "kahan" else None, counter)
                arrays = grad[at], param[at], *(state[at] for state in kept)
                now = Now(2e-3, step, rule.weight_decay)
                backend.elementwise(Rule(rule.rule, now, 0.3), *arrays, storing=storing)
            lost = lost + backend.to_host(counter)
        results.append([lost, *(backend.to_host(array) for array in (param, c, *kept))])
    for pair in zip(*results, strict=True):
        same(pair)
    assert results[0][0][0] > 0


@pytest.mark.parametrize("dtype", [fp32, fp64, bf16], ids=str)
def test_a_part_of_a_matrix_has_numpys_bits(dtype: DType) -> None:
    """Adafactor's rules and products, bf16 without masters; sums of rows and columns are added in another order."""
    part = LocalPiece(0, WeightSpec("w", (9, 20)), 13, 171, 0, 0, {})
    for o in (Adafactor(0.1), AdafactorHF(0.1, beta1=0.9)):
        results, sums = [], []
        for backend in (CUDA, NUMPY):
            kept, added = o.stored(dtype), compute_dtype(dtype)
            rows, columns = (place(backend, draw((n,), n) ** 2, kept) for n in (9, 20))
            u, m, g, w = (place(backend, draw((158,), n), kept if n < 2 else dtype) for n in range(4))
            by_row, by_column = (place(backend, np.zeros(n), added) for n in (9, 20))
            lost = place(backend, np.zeros(2), fp64)
            storing = Storing("nearest", (0, 0), 0, None, lost) if dtype.is_half else None
            backend.elementwise(Rule(square, o.tiny, 0.5), g, u)
            add_to(backend, part, u, by_row, by_column)
            fresh = place(backend, draw((9,), 1) ** 2, added)
            backend.elementwise(Rule(o.average, Average(0.3, 20.0), 1.0), fresh, rows)
            outer(backend, part, rows, columns, u)
            backend.elementwise(Rule(o.direction, Estimate(True, 0.7, 1e-7), 0.5), g, u)
            rule = Rule(o.move, o.rates(Step(1.0, 0.1, 3), 0.5, 2.0, decays=True), 1.0)
            backend.elementwise(rule, u, w, m, storing=storing)
            sums.append(np.concatenate([backend.to_host(by_row), backend.to_host(by_column)]))
            backend.elementwise(Rule(inverse_root, 0.7, 1.0), columns, by_column)
            results.append([backend.to_host(array) for array in (rows, by_column, u, w, m, lost)])
        for pair in zip(*results, strict=True):
            same(pair)
        np.testing.assert_allclose(*sums, rtol=1e-6)


@pytest.mark.parametrize("shape", [(9, 14), (14, 9)])
def test_a_matrix_takes_muons_step(shape: tuple[int, int]) -> None:
    """Every kernel of it; the products' sums are added in another order, which bf16 may round to its next number."""
    results = []
    for backend in (CUDA, NUMPY):
        device = Device(0, backend)
        weights, grad, kept = (device.alloc((126,), kind, Kind.OPTIM) for kind in (fp32, bf16, fp32))
        for seed, buffer in enumerate((weights, grad, kept)):
            backend.from_host(draw((126,), seed), buffer.array)
        Muon(weight_decay=0.1).update(weights, grad, kept, shape, Step(0.3, 0.1, 1), decays=True)
        results.append([backend.to_host(buffer.array) for buffer in (weights, kept)])
    (moved, kept_here), (expected, kept_there) = results
    same((kept_here, kept_there))
    update = expected - draw((126,), 0)
    assert np.linalg.norm(moved - expected) <= 0.01 * np.linalg.norm(update)


@pytest.mark.parametrize("half", [fp32, bf16], ids=str)
def test_an_average_of_squares_has_numpys_bits(half: DType) -> None:
    inputs, call = [(draw((500,)), half)], lambda b, g, h: b.elementwise(Rule(SophiaG.average, 0.99, 0.3), g, h)
    for stored in (fp32, half):
        same(run(call, inputs, [((500,), stored)])[0])


# -- waiting ------------------------------------------------------------------------------------------
@pytest.mark.skipif(STANDIN is None, reason="only the stand-in counts waits")
def test_only_reading_waits() -> None:
    x, ids = place(CUDA, draw((6, 40)), bf16), place(CUDA, np.arange(6), int64)
    row, stats = place(CUDA, np.ones(40), bf16), [CUDA.empty((6,), fp32) for _ in range(2)]
    out, mask, sums = CUDA.empty((6, 40), bf16), CUDA.empty((6, 40), uint8), CUDA.empty((1,), fp64)
    STANDIN.forget_waits()
    CUDA.from_host(draw((6, 40)), x)
    CUDA.layer_norm(x, row, row, 1e-5, out, *stats)
    CUDA.layer_norm_backward(x, x, row, *stats, out, row, row)
    CUDA.gelu(x, out)
    CUDA.dropout_mask((1, 2), 0.1, mask)
    CUDA.dropout(x, mask, 0.9, out)
    CUDA.embedding(ids, x, out)
    CUDA.embedding_backward(x, ids, out)
    CUDA.cross_entropy(x, ids, *stats)
    CUDA.sample_labels(x, (1, 2), 3, ids)
    CUDA.cross_entropy_backward(x, ids, stats[1], 1.0, 6, out)
    CUDA.column_sum(x, row)
    CUDA.sum_to(x, row)
    CUDA.sum_squares(x.reshape(-1), 240, sums)
    CUDA.reduce([x, out] * 8, "avg", x)
    later = CUDA.to_host_later(sums)
    assert STANDIN.waits() == []
    later()
    assert len(STANDIN.waits()) == 1
