"""The stand-in for CuPy: a run that forgets to wait fails on it, its products lie in memory as cuBLAS's do, and no
array of its own stands over memory that may be gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cupy as cp
import ml_dtypes
import numpy as np
import pytest

from zerosim.config import RunConfig
from zerosim.errors import RankFailed
from zerosim.train.run import run

if not hasattr(cp, "standin"):
    pytest.skip("a real GPU is here, and its CuPy", allow_module_level=True)

from cupy.cuda import runtime
from cupy_backends.cuda.libs import cublas

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
COMPUTE = {np.float64: cublas.CUBLAS_COMPUTE_64F}
KINDS = {np.dtype(np.float32): 0, np.dtype(np.float64): 1, np.dtype(np.float16): 2, BFLOAT16: 14}


def test_a_run_whose_streams_do_not_wait_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zerosim.backends.cuda.stream import CudaStream

    text = tmp_path / "text"
    text.write_bytes(bytes(range(16)) * 16)
    sizes = dict(layers=1, hidden=8, heads=2, seq=4, vocab=16, steps=1, micro_batch=1, ranks=2, stage=2)
    config = RunConfig(**sizes, data=str(text), backend="cuda")
    run(config)
    cp.standin.reset()
    monkeypatch.setattr(CudaStream, "wait_event", lambda self, event: None)
    with pytest.raises(RankFailed, match="no event or wait orders stream"):
        run(config)


def on_device(values: Any) -> Any:
    values = np.asarray(values)
    array = cp.empty(values.shape, values.dtype)
    array.set(values)
    return array


def gemm(
    a: Any, b: Any, c: Any, *, ops: tuple[int, int] = (0, 0), dims: Any, ld: Any, steps: Any, factors: Any
) -> None:
    pointer, mode = factors.ctypes.data, COMPUTE.get(factors.dtype.type, cublas.CUBLAS_COMPUTE_32F)
    cublas.gemmStridedBatchedEx(
        *(cp.cuda.device.get_cublas_handle(), *ops, *dims[:3], pointer),
        *(a.data.ptr, KINDS[a.dtype], ld[0], steps[0], b.data.ptr, KINDS[b.dtype], ld[1], steps[1]),
        *(pointer + factors.itemsize, c.data.ptr, KINDS[c.dtype], ld[2], steps[2], dims[3], mode, -1),
    )


@pytest.mark.parametrize("ops", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("dtypes", [(np.float32, np.float32), (np.float16, np.float32), (BFLOAT16, BFLOAT16)])
def test_gemm_is_column_major(ops: tuple[int, int], dtypes: tuple[Any, Any]) -> None:
    m, n, k, batch = 3, 5, 4, 2
    rng = np.random.default_rng(3)
    a, b, c = (
        np.asfortranarray(rng.integers(-4, 4, (batch, *shape))).astype(dtype)
        for shape, dtype in (
            ((k, m) if ops[0] else (m, k), dtypes[0]),
            ((n, k) if ops[1] else (k, n), dtypes[0]),
            ((m, n), dtypes[1]),
        )
    )
    expected = 2 * np.matmul(
        *(
            x.astype(np.float64).swapaxes(1, 2) if op else x.astype(np.float64)
            for x, op in zip((a, b), ops, strict=True)
        )
    ) - c.astype(np.float64)
    ld = [x.shape[1] + extra for x, extra in zip((a, b, c), (0, 2, 1), strict=True)]
    held = []
    for x, leading in zip((a, b, c), ld, strict=True):
        padded = np.full((batch, x.shape[2], leading), 99, x.dtype)  # row-major rows are the columns
        padded[:, :, : x.shape[1]] = x.swapaxes(1, 2)
        held.append(on_device(padded))
    steps = [x.shape[1] * x.shape[2] for x in held]
    gemm(*held, ops=ops, dims=(m, n, k, batch), ld=ld, steps=steps, factors=np.array([2, -1], np.float32))
    out = held[2].get()
    np.testing.assert_array_equal(out[:, :, :m].swapaxes(1, 2), expected.astype(dtypes[1]))
    assert (out[:, :, m:].astype(np.float32) == 99).all()


# -- memory that may be gone ------------------------------------------------------------------------------
def owner_of(array: Any) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def test_a_copy_that_fails_leaves_no_array_over_memory_that_may_go() -> None:
    """A test's report prints the arrays of its frames, when what an address led to may be gone: that ended pytest."""
    x, pageable = cp.empty(16, np.uint8), np.zeros(512, np.uint8)
    with pytest.raises(cp.standin.StandinError, match="illegal address") as caught:
        runtime.memcpyAsync(x.data.ptr, pageable.ctypes.data, 512, runtime.memcpyHostToDevice, 0)
    held = [value for entry in caught.traceback for value in entry.locals.values() if isinstance(value, np.ndarray)]
    assert held
    assert all(owner_of(array).flags.owndata for array in held)


def test_an_array_over_no_memory_can_be_printed() -> None:
    """NumPy works out views of device memory on a ghost; where a view fails, a test's report prints the ghost."""
    with pytest.raises(TypeError, match="negative step") as caught:
        cp.empty((4, 6), np.float32)[:, ::-1]
    ghost = caught.traceback[-1].locals["ghost"]
    assert (ghost.shape, ghost.strides) == ((4, 6), (24, 4))
    assert owner_of(ghost).flags.owndata
    assert "x00" in repr(ghost)
