"""CUDA graphs on the stand-in: what a capturing stream refuses, and runs that are the same with graphs and without.

A run's results, its events and its pool at every mark are compared with ==; what Python launches is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
import pytest
from same import assert_same_bits

if not hasattr(cp, "standin"):
    pytest.skip("a real GPU is here, and its CuPy", allow_module_level=True)

from cupy._clock import current_stream
from cupy.cuda import runtime
from cupy_backends.cuda.libs import _libcublas, cublas

from zerosim.backends.cuda import ops, tape
from zerosim.backends.cuda.check import check_graphs
from zerosim.backends.cuda.graphs import GraphsBackend, GraphStream
from zerosim.backends.cuda.libraries import Cublas, LibraryError, cublas_library
from zerosim.backends.cuda.products import product
from zerosim.backends.kernels import AdamStep
from zerosim.config import RunConfig
from zerosim.device.events import Pool
from zerosim.errors import InputError
from zerosim.train.result import RunResult
from zerosim.train.run import run

STANDIN: Any = cp.standin
REFUSED = "cudaErrorStreamCaptureUnsupported"
THREAD_LOCAL = runtime.streamCaptureModeThreadLocal
TINY: dict[str, Any] = dict(
    layers=2, hidden=10, heads=2, seq=5, vocab=19, micro_batch=1, seed=3, lr=1e-2, ranks=2, stage=3, backend="cuda"
)


# -- the stand-in -------------------------------------------------------------------------------------
@pytest.fixture
def stream() -> Iterator[Any]:
    with cp.cuda.Stream(non_blocking=True) as found:
        yield found


def numbers(*values: float) -> Any:
    array = cp.empty((len(values),), np.float32)
    array.set(np.array(values, np.float32))
    return array


def test_a_graph_launches_what_was_captured_on_the_same_memory(stream: Any) -> None:
    a, out = numbers(1, 2), numbers(0, 0)
    stream.begin_capture(THREAD_LOCAL)
    ops.add(a, 1.0, out)
    ops.multiply(out, out, out)
    graph = stream.end_capture()
    assert out.get().tolist() == [0, 0]  # captured, not run
    graph.launch()
    assert out.get().tolist() == [4, 9]
    a.set(np.array([3, 4], np.float32))
    graph.launch()
    assert out.get().tolist() == [16, 25]


CALLS: dict[str, Any] = {
    "memory": lambda a: cp.cuda.Memory(512),
    "pool": lambda a: cp.cuda.MemoryPool().malloc(512),
    "free": lambda a: cp.cuda.MemoryPool().free_all_blocks() or a[2].free_all_blocks(),
    "wait": lambda a: cp.cuda.get_current_stream().synchronize(),
    "download": lambda a: a[0].get(),
    "upload": lambda a: a[0].set(np.zeros(2, np.float32)),
    "item": lambda a: float(a[0][0]),
    "record": lambda a: cp.cuda.Event().record(),
    "wait for another": lambda a: cp.cuda.get_current_stream().wait_event(a[1]),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_a_capturing_stream_refuses_ends_the_capture(call: str, stream: Any) -> None:
    a, event, pool = numbers(1, 2), cp.cuda.Event(), cp.cuda.MemoryPool()
    pool.malloc(512)
    event.record()
    stream.begin_capture(THREAD_LOCAL)
    with pytest.raises(STANDIN.StandinError, match=f"{REFUSED}|which is capturing"):
        CALLS[call]((a, event, pool))
    with pytest.raises(STANDIN.StandinError, match="cudaErrorStreamCaptureInvalidated"):
        stream.end_capture()


def test_cupy_refuses_cublas_on_a_capturing_stream_and_a_handle_of_ones_own_does_not(stream: Any) -> None:
    a, b, out, again = (cp.empty((2, 2), np.float32) for _ in range(4))
    for array, values in ((a, [[1, 2], [3, 4]]), (b, [[0, 1], [1, 0]])):
        array.set(np.array(values, np.float32))
    product(a, b, out)
    workspace = cp.cuda.Memory(1 << 20)
    stream.begin_capture(THREAD_LOCAL)
    with pytest.raises(NotImplementedError, match="calling cuBLAS API during stream capture"):
        product(a, b, again)
    stream.blas = Cublas(stream.ptr, workspace.ptr, workspace.size, 16)
    product(a, b, again)
    stream.end_capture().launch()
    assert again.get().tolist() == out.get().tolist() == [[2, 1], [4, 3]]


def test_a_product_without_a_workspace_allocates_which_a_capture_refuses(
    stream: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    a, out = cp.empty((2, 2), np.float32), cp.empty((2, 2), np.float32)
    stream.blas = Cublas(stream.ptr, 0, 0, 16)
    stream.begin_capture(THREAD_LOCAL)
    with pytest.raises(LibraryError, match="cublasGemmStridedBatchedEx returns status 13"):
        product(a, a, out)
    with pytest.raises(STANDIN.StandinError, match="Invalidated"):
        stream.end_capture()


def test_a_cublas_of_another_cuda_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cublas.getVersion(0) == 130000
    monkeypatch.setattr(_libcublas, "VERSION", (12, 9, 0))
    cublas_library.cache_clear()
    try:
        with pytest.raises(
            InputError, match=r"libcublas.so.13 is cuBLAS 12, and CuPy .* CUDA 13: leave --capture-graphs"
        ):
            check_graphs()
    finally:
        monkeypatch.undo()
        cublas_library.cache_clear()
    check_graphs()


# -- the tape -----------------------------------------------------------------------------------------
@pytest.fixture
def taped() -> Iterator[GraphStream]:
    found = GraphStream(0)
    with found.use():
        yield found


def launched(work: Any) -> dict[str, int]:
    STANDIN.forget_launches()
    work()
    return dict(STANDIN.launches())


def test_what_repeats_is_captured_once_and_then_one_launch(taped: GraphStream) -> None:
    backend, a, out = GraphsBackend(), numbers(1, 2), numbers(0, 0)

    def three(number: float = 2.0) -> None:
        backend.add(a, number, out)
        backend.multiply(out, out, out)
        backend.subtract(out, 1.0, out)
        taped.flush()

    nothing = dict.fromkeys(STANDIN.launches(), 0)
    assert launched(three) == {**nothing, "alone": 3}
    assert launched(three) == {**nothing, "captured": 3, "graphs": 1, "replayed": 3}
    assert launched(three) == {**nothing, "graphs": 1, "replayed": 3}
    assert taped.download(out).view(np.float32).tolist() == [8, 15]
    assert launched(lambda: three(0.0)) == {**nothing, "alone": 3}
    assert launched(lambda: three(-0.0))["alone"] == 3  # not 0, and held back by nobody
    assert launched(three)["graphs"] == 1
    b = numbers(5, 5)
    assert launched(lambda: (backend.add(b, 2.0, out), taped.flush()))["alone"] == 1
    assert taped.download(out).view(np.float32).tolist() == [7, 7]


def test_a_buffer_that_dies_leaves_its_memory_to_the_next_in_order(taped: GraphStream) -> None:
    backend, a, out = GraphsBackend(), numbers(1, 2), numbers(0, 0)
    for _ in range(3):
        first = cp.empty((2,), np.float32)
        backend.add(a, 1.0, first)
        place = first.data.ptr
        backend.multiply(first, 10.0, out)
        del first
        second = cp.empty((2,), np.float32)
        assert second.data.ptr == place
        backend.add(out, 1.0, second)
        assert backend.to_host(second).tolist() == [21, 31]
        del second


def test_copies_and_kernels_that_always_change_come_after_what_waits(taped: GraphStream) -> None:
    backend, a, out, moments = GraphsBackend(), numbers(1, 2), numbers(0, 0), [numbers(0, 0), numbers(0, 0)]
    backend.add(a, 1.0, out)
    backend.from_host(np.array([5.0, 6.0]), a)
    assert backend.to_host(out).tolist() == [2, 3]
    backend.multiply(a, 2.0, out)
    step = AdamStep(1.0, 0.1, 0.9, 0.99, 1e-8, 0.0, False, 1)
    assert launched(lambda: backend.adam(out, a, *moments, step))["alone"] == 2


def test_a_full_tape_is_launched_and_the_pool_grows_after_it(taped: GraphStream) -> None:
    backend, a = GraphsBackend(), numbers(1, 2)
    assert launched(lambda: [backend.add(a, 0.0, a) for _ in range(tape.CALLS - 1)])["alone"] == 0
    assert launched(lambda: backend.add(a, 0.0, a))["alone"] == tape.CALLS
    backend.add(a, 0.0, a)
    assert launched(lambda: cp.empty((1 << 20,), np.float32))["alone"] == 1


def test_what_a_capture_refuses_runs_one_by_one_and_says_so(
    taped: GraphStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, a, out = GraphsBackend(), numbers(1, 2), numbers(0, 0)
    monkeypatch.delattr(taped.cupy_stream, "blas")  # products go through CuPy then

    def twice() -> None:
        backend.matmul(a.reshape(1, 2), a.reshape(2, 1), out[:1].reshape(1, 1))
        taped.flush()

    twice()
    with pytest.warns(RuntimeWarning, match="cuBLAS API during stream capture .*: 1 kernels are launched one by one"):
        twice()
    assert launched(twice) == {"alone": 1, "captured": 0, "graphs": 0, "replayed": 0}
    assert taped.download(out).view(np.float32).tolist() == [5, 0]


def test_where_memory_runs_out_graphs_go_before_their_scratch(taped: GraphStream) -> None:
    backend = GraphsBackend()
    a, out = numbers(*range(64)), numbers(*range(64))

    def mixed() -> None:  # every other element: a product copies both to scratch
        backend.matmul(a[::2].reshape(4, 8)[:, ::2], a[::2].reshape(4, 8)[:, 1::2], out[::4].reshape(4, 4))
        taped.flush()

    for _ in range(3):
        mixed()
    expected = taped.download(out)
    assert launched(mixed)["graphs"] == 1
    free, whole = cp.cuda.Device(0).mem_info
    STANDIN.set_device_bytes(whole - free + (1 << 20))
    with pytest.raises(cp.cuda.memory.OutOfMemoryError):
        taped._tape.scratch.malloc(1 << 30)
    assert [launched(mixed)["graphs"] for _ in range(2)] == [0, 1]  # captured anew
    assert taped.download(out).tobytes() == expected.tobytes()


# -- runs ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("graphs") / "text"
    path.write_bytes(np.random.default_rng(5).integers(0, 19, 400, dtype=np.uint8).tobytes())
    return str(path)


RUNS: list[Any] = [
    dict(precision="fp32", layers=1, attention="flash", batched_flash=True),
    *(
        pytest.param(fields, marks=pytest.mark.slow)
        for fields in (
            dict(stage=2, precision="fp16", loss_scale=64.0, accumulate=2),
            dict(ranks=1, stage=0, attention="flash", recompute="full", precision="bf16"),
            dict(precision="bf16-pure", rounding="stochastic", clip_norm=1.0),
            dict(precision="bf16", dropout=0.2, attention="flash"),
            dict(model="llama", hidden=12, kv_heads=1, precision="bf16", parallel=2),
            dict(stage=0, tp=2, vocab=20, precision="fp32", collective="ring", bucket_bytes=256),
            dict(model="llama", hidden=12, experts=4, top_k=2, precision="fp32"),
        )
    ),
]


def trained(fields: dict[str, Any], text: str, graphs: bool, steps: int = 5) -> tuple[RunResult, int]:
    """A run, and how often Python launched something in it."""
    STANDIN.forget_launches()
    config = RunConfig(**{**TINY, **fields}, data=text, steps=steps, capture_graphs=graphs)
    result, counts = run(config, keep_events=True), STANDIN.launches()
    assert bool(counts["graphs"]) == graphs
    return result, counts["alone"] + counts["captured"] + counts["graphs"]


@pytest.mark.parametrize("fields", RUNS, ids=lambda fields: " ".join(map(str, fields.values())))
def test_a_run_with_graphs_is_the_run_without(fields: dict[str, Any], text: str) -> None:
    (plain, _), (replayed, _) = (trained(fields, text, graphs) for graphs in (False, True))
    assert_same_bits(plain, replayed)
    assert plain.losses == replayed.losses
    for rank, events in enumerate(plain.events):
        kept = [[e for e in all_of if not isinstance(e, Pool)] for all_of in (events, replayed.events[rank])]
        assert kept[0] == kept[1]
        marks = [(row.used_bytes, row.unexplained_bytes) for row in replayed.memory[rank].pool]
        assert marks == [(row.used_bytes, 0) for row in plain.memory[rank].pool]


def test_a_step_whose_buffers_repeat_is_a_few_launches(text: str) -> None:
    """When this was written: 14 graphs and 7 launches of what changes with every step; without graphs 251."""
    fields = dict(ranks=1, stage=0, precision="bf16", layers=4)
    without, with_graphs = ([trained(fields, text, graphs, steps)[1] for steps in (4, 5)] for graphs in (False, True))
    assert 0 < 10 * (with_graphs[1] - with_graphs[0]) < without[1] - without[0]


def test_graphs_without_cuda_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from zerosim.cli.main import main

    assert main(["run", "--capture-graphs", "--steps", "1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "backend numpy has none; choose --backend cuda, or leave --capture-graphs out" in said


def test_a_run_gives_its_memory_back(text: str, tmp_path: Path) -> None:
    before = cp.cuda.Device(0).mem_info
    run(RunConfig(**TINY, data=text, steps=3, precision="fp32", capture_graphs=True))
    assert cp.cuda.Device(0).mem_info == before
    assert current_stream().capture is None
