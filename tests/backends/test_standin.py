"""The stand-in for CuPy is strict where it says so, and its kernels compute what NumPy computes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
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

from cupy.cuda import nccl, runtime
from cupy_backends.cuda.libs import cublas

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ADD_ONE = cp.ElementwiseKernel("T x", "T y", "y = x + T(1)", "add_one")
Error, Race = cp.standin.StandinError, cp.standin.RaceError


@pytest.fixture(autouse=True)
def nothing_is_collected() -> Iterator[None]:
    """A backend of an earlier test, collected in the middle of one here, gives its pools back: cudaFree, which waits,
    and orders what a test wants unordered."""
    gc.collect()
    cp.standin.forget_waits()
    gc.disable()
    yield
    gc.enable()


def on_device(values: Any) -> Any:
    values = np.asarray(values)
    array = cp.empty(values.shape, values.dtype)
    array.set(values)
    return array


def raw(code: str, name: str = "f") -> Any:
    return cp.RawModule(code=code, options=("--std=c++17",), name_expressions=[name]).get_function(name)


def stream() -> Any:
    return cp.cuda.Stream(non_blocking=True)


def kinds() -> list[str]:
    return [wait.kind for wait in cp.standin.waits()]


# -- streams, events and races ----------------------------------------------------------------------------


def test_a_read_must_be_ordered_after_the_write() -> None:
    writer, reader, x, out = stream(), stream(), on_device(np.zeros(8, np.float32)), cp.empty(8, np.float32)
    cp.cuda.get_current_stream().synchronize()
    with writer:
        ADD_ONE(x, x)
        written = writer.record(cp.cuda.Event(disable_timing=True))
    with reader:
        with pytest.raises(Race, match=r"add_one \(test_standin.py:\d+ .*\) on stream \d+ reads bytes that add_one"):
            ADD_ONE(x, out)
        reader.wait_event(written)
        ADD_ONE(x, out)
    reader.synchronize()
    assert out.get().tolist() == [2.0] * 8


def test_a_write_must_be_ordered_after_other_streams_reads() -> None:
    owner, reader = stream(), stream()
    with owner:
        x = on_device(np.zeros(8, np.float32))
        ready = owner.record()
    with reader:
        reader.wait_event(ready)
        ADD_ONE(x, cp.empty(8, np.float32))
    with owner:
        with pytest.raises(Race, match="may still be reading"):
            x.fill(3)
        owner.wait_event(reader.record())
        x.fill(3)


def test_freed_memory_is_reused_only_after_its_readers() -> None:
    owner, reader, pool = stream(), stream(), cp.cuda.MemoryPool()

    def hand_over(ordered: bool) -> None:
        with owner, cp.cuda.using_allocator(pool.malloc):
            x = on_device(np.zeros(1024, np.float32))
            ready = owner.record()
            address = x.data.ptr
            with reader:
                reader.wait_event(ready)
                ADD_ONE(x, cp.empty(1024, np.float32))
            if ordered:
                owner.wait_event(reader.record())
            del x
            again = cp.empty(1024, np.float32)
            assert again.data.ptr == address
            again.fill(1)

    hand_over(ordered=True)
    with pytest.raises(Race, match="writes bytes that add_one"):
        hand_over(ordered=False)


def test_parts_of_an_array_have_their_own_history() -> None:
    one, two, x = stream(), stream(), cp.empty((4, 8), np.float32)
    with one:
        x[:2].fill(1)
        x[2:, ::2].fill(1)
    with two:
        x[2:, 1::2].fill(2)
        with pytest.raises(Race):
            x[2:, :2].fill(2)


def test_an_event_orders_what_came_before_it_only() -> None:
    one, two, x = stream(), stream(), cp.empty(8, np.float32)
    never, early = cp.cuda.Event(), one.record()
    with one:
        x.fill(1)
    with two:
        two.wait_event(early)
        two.wait_event(never)  # never recorded: orders nothing, and says nothing, as in CUDA
        with pytest.raises(Race):
            x.fill(2)


def test_order_is_handed_on_and_a_wait_of_the_host_orders_all_that_follows() -> None:
    one, two, three, x = stream(), stream(), stream(), cp.empty(8, np.float32)
    with one:
        x.fill(1)
    two.wait_event(one.record())
    three.wait_event(two.record())
    with three:
        x.fill(2)
    three.synchronize()
    with stream():
        x.fill(3)


def test_the_null_stream_waits_for_blocking_streams_and_not_for_others() -> None:
    x = cp.empty(8, np.float32)
    with cp.cuda.Stream():
        x.fill(1)
    x.fill(2)
    with stream(), pytest.raises(Race):
        x.fill(3)


def test_races_are_those_of_the_whole_order() -> None:
    """Random programs against an oracle that keeps, for every launch, the set of all launches ordered before it."""
    rng, found = np.random.default_rng(4), 0
    for _ in range(120):
        careful = 1 - 0.3 * rng.random() ** 3
        streams = [stream() for _ in range(3)]
        x, own = cp.empty(8, np.uint8), [cp.empty(8, np.uint8) for _ in streams]
        seen: list[set[int]] = [set() for _ in streams]
        events: list[tuple[Any, set[int]]] = []
        launched: list[tuple[bool, set[int]]] = []
        done: set[int] = set()
        for _ in range(30):
            s, act = int(rng.integers(3)), int(rng.integers(8))
            if act < 4:
                start, end = sorted(rng.choice(9, 2, replace=False).tolist())
                touched, writes = set(range(start, end)), act < 2
                for other in range(3) if rng.random() < careful else ():
                    streams[s].wait_event(streams[other].record())
                    seen[s] |= seen[other]
                before = seen[s] | done
                race = any(
                    n not in before and (writes or wrote) and touched & other
                    for n, (wrote, other) in enumerate(launched)
                )
                seen[s].add(len(launched))
                launched.append((writes, touched))
                with streams[s]:
                    touch = (lambda a: a.fill(1)) if writes else (lambda a, o=own[s]: ADD_ONE(a, o[: a.size]))
                    if race:
                        found += 1
                        with pytest.raises(Race):
                            touch(x[start:end])
                        break
                    touch(x[start:end])
            elif act == 4:
                events.append((streams[s].record(), set(seen[s])))
            elif act < 7 and events:
                event, past = events[int(rng.integers(len(events)))]
                streams[s].wait_event(event)
                seen[s] |= past
            elif rng.integers(4) == 0:
                streams[s].synchronize()
                done |= seen[s]
        cp.standin.reset()
    assert 20 < found < 100  # both kinds of programs were among them


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


# -- waits, pinned memory ---------------------------------------------------------------------------------


def test_waits_are_counted_with_their_place() -> None:
    x, event = on_device(np.ones(1, np.float32)), cp.cuda.Event()
    ADD_ONE(x, x)
    assert cp.standin.waits() == []
    event.record()
    assert not event.done
    event.synchronize()
    event.synchronize()
    assert event.done
    assert float(x) == 2.0
    assert x.get().tolist() == [2.0]
    cp.cuda.get_current_stream().synchronize()
    cp.cuda.Device(0).synchronize()
    number = "a Python number out of an array"
    assert kinds() == ["event.synchronize", number, "get", "stream.synchronize", "device.synchronize"]
    assert all(wait.place.startswith("test_standin.py:") for wait in cp.standin.waits())


def test_a_copy_to_pinned_memory_shows_after_a_wait_and_not_before() -> None:
    block, pageable = cp.cuda.alloc_pinned_memory(16), np.zeros(4, np.float32)
    host = np.frombuffer(block, np.float32, 4)
    own = stream()
    with own:
        x = on_device(np.arange(4, dtype=np.float32))
        runtime.memcpyAsync(block.ptr, x.data.ptr, 16, runtime.memcpyDeviceToHost, own.ptr)
        assert np.isnan(host).all()
        assert kinds() == []
        own.record().synchronize()
        assert host.tolist() == [0, 1, 2, 3]
        runtime.memcpyAsync(pageable.ctypes.data, x.data.ptr, 16, runtime.memcpyDeviceToHost, own.ptr)
    assert kinds() == ["event.synchronize", "a copy to pageable host memory"]
    with pytest.raises(Error, match="the pointers say 2"):
        runtime.memcpyAsync(block.ptr, x.data.ptr, 16, runtime.memcpyHostToDevice, 0)


def test_pinned_memory_under_way_must_be_left_alone() -> None:
    block, x, own = cp.cuda.alloc_pinned_memory(16), cp.empty(4, np.float32), stream()
    runtime.memcpyAsync(x.data.ptr, block.ptr, 16, runtime.memcpyHostToDevice, own.ptr)
    block[0] = 7
    with pytest.raises(Race, match="pinned memory was changed"):
        own.synchronize()


def test_a_pinned_block_is_handed_out_again_as_soon_as_it_is_dropped() -> None:
    block, x, own = cp.cuda.alloc_pinned_memory(5000), cp.empty(5000, np.uint8), stream()
    place = block.ptr
    runtime.memcpyAsync(x.data.ptr, block.ptr, 5000, runtime.memcpyHostToDevice, own.ptr)
    del block
    other, again = cp.cuda.alloc_pinned_memory(4000), cp.cuda.alloc_pinned_memory(8000)
    assert other.ptr != place == again.ptr
    np.frombuffer(again, np.uint8)[0] = 7
    with pytest.raises(Race, match="pinned memory was changed"):
        own.synchronize()


def test_an_event_is_of_one_device() -> None:
    cp.standin.set_device_count(2)
    event = cp.cuda.Event(disable_timing=True)
    with cp.cuda.Device(1):
        other = stream()
        with pytest.raises(Error, match=r"an event of device 0 records stream .* of device 1"):
            event.record(other)
        other.wait_event(event)


def test_elapsed_time_wants_recorded_events_with_a_clock() -> None:
    start, end, bare = cp.cuda.Event(), cp.cuda.Event(), cp.cuda.Event(disable_timing=True)
    for event in (start, bare, end):
        event.record()
    end.synchronize()
    assert cp.cuda.get_elapsed_time(start, end) >= 0
    with pytest.raises(Error, match="disable_timing"):
        cp.cuda.get_elapsed_time(start, bare)


# -- memory -----------------------------------------------------------------------------------------------


def test_a_dropped_pool_keeps_what_it_held() -> None:
    pool, before = cp.cuda.MemoryPool(), cp.cuda.Device(0).mem_info[0]
    with cp.cuda.using_allocator(pool.malloc):
        cp.empty(1000, np.uint8)
    pool.free_all_blocks()
    assert cp.cuda.Device(0).mem_info[0] == before
    with cp.cuda.using_allocator(pool.malloc):
        cp.empty(1000, np.uint8)
    del pool
    assert cp.cuda.Device(0).mem_info[0] == before - 1024


def test_a_pool_rounds_splits_merges_and_refuses() -> None:
    pool = cp.cuda.MemoryPool()
    with cp.cuda.using_allocator(pool.malloc):
        whole = cp.empty(4096, np.uint8)
        assert (pool.used_bytes(), pool.total_bytes()) == (4096, 4096)
        address = whole.data.ptr
        del whole
        a, b = cp.empty(1, np.uint8), cp.empty(513, np.uint8)
        assert (a.data.ptr, b.data.ptr) == (address, address + 512)
        assert (pool.used_bytes(), pool.total_bytes()) == (512 + 1024, 4096)
        with stream():
            other = cp.empty(1, np.uint8)  # another stream's arena
            assert pool.total_bytes() == 4096 + 512
        del a, b
        assert cp.empty(4096, np.uint8).data.ptr == address
        pool.set_limit(size=8192)
        with pytest.raises(cp.cuda.memory.OutOfMemoryError, match="Out of memory allocating 8,192 bytes"):
            cp.empty(8000, np.uint8)
        del other
        pool.free_all_blocks()
        assert (pool.used_bytes(), pool.total_bytes()) == (0, 0)
        assert cp.empty(0, np.float32).data.ptr == 0


def test_allocators_belong_to_a_thread() -> None:
    mine, theirs = cp.cuda.MemoryPool(), cp.cuda.MemoryPool()
    held = []

    def other() -> None:
        with cp.cuda.using_allocator(theirs.malloc):
            held.append(cp.empty(1, np.uint8))

    with cp.cuda.using_allocator(mine.malloc):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert (mine.used_bytes(), theirs.used_bytes()) == (0, 512)


def test_devices_keep_to_themselves() -> None:
    cp.standin.set_device_count(2)
    here = on_device(np.arange(4, dtype=np.float32))
    with cp.cuda.Device(1):
        there, out, far = on_device(np.zeros(4, np.float32)), cp.empty(4, np.float32), stream()
        assert (here.device.id, there.device.id) == (0, 1)
        with pytest.raises(ValueError, match=r"resides \(0\) is different from the current device \(1\)"):
            ADD_ONE(here, out)
        with pytest.raises(Race):
            runtime.memcpyPeerAsync(there.data.ptr, 1, here.data.ptr, 0, 16, far.ptr)
        far.wait_event(cp.cuda.get_current_stream().record())
        with cp.cuda.Device(0):
            event = cp.cuda.get_current_stream().record()
        far.wait_event(event)
        runtime.memcpyPeerAsync(there.data.ptr, 1, here.data.ptr, 0, 16, far.ptr)
        assert there.get(stream=far).tolist() == [0, 1, 2, 3]
        with pytest.raises(Error, match="told device 0 for memory of device 1"):
            runtime.memcpyPeerAsync(out.data.ptr, 0, here.data.ptr, 0, 16, far.ptr)
    with pytest.raises(RuntimeError, match="does not match with the current device"):
        far.use()
    with pytest.raises(runtime.CUDARuntimeError):
        cp.cuda.Device(2)


# -- refusals ---------------------------------------------------------------------------------------------


def test_nothing_mixes_with_numpy_or_computes_unasked() -> None:
    x, host = on_device(np.ones((2, 3), np.float32)), np.ones((2, 3), np.float32)
    with pytest.raises(TypeError, match=r"\.get\(\)"):
        np.asarray(x)
    for act in (lambda: x + host, lambda: host + x, lambda: np.add(host, x), lambda: x * 2, lambda: x == x):
        with pytest.raises(TypeError):
            act()
    with pytest.raises(TypeError, match="basic slicing"):
        x[np.array([0])]
    with pytest.raises(TypeError, match="copies on the device"):
        x.transpose().reshape(6)
    with pytest.raises(TypeError, match="arrays must be cupy's"):
        ADD_ONE(host, x)
    for act in (lambda: cp.matmul, lambda: x.sum, lambda: cp.cuda.Graph, lambda: cublas.sgemm, lambda: nccl.send):
        with pytest.raises(AttributeError, match="not in the part of CuPy that zerosim uses"):
            act()
    with pytest.raises(AttributeError):
        x[0] = 1
    with pytest.raises(TypeError, match="float64 array cannot be set to float32"):
        x.set(host.astype(np.float64))


def test_views_are_numpys_views() -> None:
    host = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    x = on_device(host)
    for view in (
        lambda a: a[1],
        lambda a: a[:, 1:, ::2],
        lambda a: a[..., None, 2],
        lambda a: a.transpose(2, 0, 1),
        lambda a: a.swapaxes(0, 2)[1:],
        lambda a: a.reshape(6, -1)[:, :2],
        lambda a: a[1, 2, 3:],
        lambda a: a[:, :0],
    ):
        expected, got = view(host), view(x)
        assert (got.shape, got.strides) == (expected.shape, expected.strides)
        assert got.flags.c_contiguous == expected.flags.c_contiguous
        np.testing.assert_array_equal(got.get(), expected)


# -- elementwise kernels ----------------------------------------------------------------------------------


def test_elementwise_broadcasts_strides_and_resolves_types() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((5, 1, 4)).astype(np.float16), rng.standard_normal((3, 4)).astype(BFLOAT16)
    table = rng.standard_normal(7).astype(np.float32)
    kernel = cp.ElementwiseKernel(
        "T a, U b, raw V table, float32 s, int64 k",
        "W out",
        "out = (float)a * s + (float)b + table[(i + k) % table.size()]",
        "mixed",
    )
    out = cp.empty((4, 3, 5), np.float64)
    kernel(on_device(a), on_device(b), on_device(table), 0.5, 3, out.transpose(2, 1, 0))
    order = (np.arange(60) + 3) % 7
    expected = (a.astype(np.float32) * np.float32(0.5) + b.astype(np.float32)) + table[order].reshape(5, 3, 4)
    np.testing.assert_array_equal(out.get().transpose(2, 1, 0), expected)


def test_elementwise_refuses_what_cupy_refuses() -> None:
    x, y, z = (cp.zeros((2, 3), dtype) for dtype in (np.float32, np.float32, np.float64))
    kernel = cp.ElementwiseKernel("T x, int32 k", "T y", "y = x", "kernel")
    with pytest.raises(TypeError, match="Type is mismatched"):
        kernel(x, 1, z)
    with pytest.raises(TypeError, match="Wrong number"):
        kernel(x)
    with pytest.raises(ValueError, match="Out shape"):
        kernel(x, 1, y[:1])
    with pytest.raises(TypeError, match=r"int32 and got 1\.5"):
        kernel(x, 1.5, y)
    with pytest.raises(ValueError, match="'i'"):
        cp.ElementwiseKernel("T i", "T y", "y = i")
    with pytest.raises(Error, match="out of its bounds"):
        cp.ElementwiseKernel("raw T x", "T y", "y = x[i + 1]", "beyond")(x, y)
    for body in ("y = INFINITY", "y = n", "y = std::exp(x)", "x = 1"):
        with pytest.raises(Error, match="does not compile"):
            cp.ElementwiseKernel("T x", "T y", body, "wrong")(x, y)


# -- half types -------------------------------------------------------------------------------------------

CONVERT = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
template <class From, class To> __global__ void convert(const From* x, To* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = static_cast<To>(x[i]);
}
"""
CTYPES = {np.dtype(np.float16): "__half", BFLOAT16: "__nv_bfloat16", np.dtype(np.float32): "float"}
CTYPES[np.dtype(np.float64)] = "double"


def converted(values: np.ndarray, dtype: Any) -> np.ndarray:
    out = cp.empty(values.shape, dtype)
    kernel = raw(CONVERT, f"convert<{CTYPES[values.dtype]}, {CTYPES[np.dtype(dtype)]}>")
    kernel((-(-values.size // 256),), (256,), (on_device(values), out, np.int32(values.size)))
    return out.get()


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16])
def test_half_types_convert_exactly(dtype: np.dtype) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    wide = every.astype(np.float32)
    np.testing.assert_array_equal(
        converted(every, np.float32).view(np.uint32)[~np.isnan(wide)], wide.view(np.uint32)[~np.isnan(wide)]
    )
    assert np.isnan(converted(every, np.float32)[np.isnan(wide)]).all()
    rng = np.random.default_rng(1)
    edges = np.sort(wide[np.isfinite(wide)])
    ties = ((edges[1:].astype(np.float64) + edges[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([edges, ties, *near, bits, np.float32([np.inf, -np.inf, 0.0, -0.0, 65519, 65520, 3.4e38])])
    with np.errstate(all="ignore"):
        expected = values.astype(dtype)
    got, number = converted(values, dtype), ~np.isnan(values)
    np.testing.assert_array_equal(got.view(np.uint16)[number], expected.view(np.uint16)[number])
    assert np.isnan(got[~number].astype(np.float32)).all()


def test_a_double_becomes_a_half_in_one_rounding() -> None:
    tie = 1 + 2.0**-11
    values = np.array(
        [tie, np.nextafter(tie, 2), np.nextafter(tie, 0), 2.0**-25, np.nextafter(2.0**-25, 1), 1e300, 1e-300]
    )
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(converted(values, np.float16), values.astype(np.float16))
    tie = 1 + 2.0**-8
    got = converted(np.array([np.nextafter(tie, 2), np.nextafter(tie, 0)]), BFLOAT16).astype(np.float64)
    assert got.tolist() == [1 + 2.0**-7, 1.0]


@pytest.mark.parametrize("body", ["h * 2.0f", "h * h", "std::move(h)", "uint64_t(1)", "INFINITY"])
def test_what_nvrtc_or_the_house_refuses_does_not_compile(body: str) -> None:
    with pytest.raises(Error, match="does not compile"):
        raw(f"#include <cuda_fp16.h>\n__global__ void f(float* y, __half h) {{ y[0] = {body}; }}")


# -- raw kernels ------------------------------------------------------------------------------------------

ROWS = """
template <class T> __global__ void sums(const T* x, float* out, long long columns, float scale) {
    extern __shared__ float part[];
    __shared__ float total;
    float v = 0;
    for (long long c = threadIdx.x; c < columns; c += blockDim.x) v += static_cast<float>(x[blockIdx.x * columns + c]);
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x == 0) {
        total = 0;
        for (int w = 0; w < blockDim.x / 32; ++w) total += part[w];
    }
    __syncthreads();
    if (threadIdx.x == blockDim.x - 1) out[blockIdx.x] = total * scale;
}
"""


@pytest.mark.parametrize("order", ["forward", "reverse", "alternate"])
def test_a_row_kernel_adds_rows(order: str) -> None:
    cp.standin.set_thread_order(order)
    x = np.random.default_rng(2).integers(-9, 9, (6, 1000)).astype(np.float32)
    out = cp.empty(6, np.float32)
    raw(ROWS, "sums<float>")((6,), (96,), (on_device(x), out, 1000, np.float32(0.5)), shared_mem=12)
    np.testing.assert_array_equal(out.get(), x.sum(1) / 2)


def test_grids_blocks_and_lanes_are_numbered_as_in_cuda() -> None:
    code = """
    __global__ void f(int* out) {
        const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        const int size = blockDim.x * blockDim.y * blockDim.z;
        const int up = __shfl_down_sync(0xffffffffu, thread, 1), first = __shfl_sync(0xffffffffu, thread, 0);
        out[block * size + thread] = block * 10000 + up * 100 + first;
    }"""
    out = cp.empty((6, 64), np.int32)
    raw(code)((3, 1, 2), (8, 4, 2), (out,))
    thread = np.arange(64)
    up = np.where(thread % 32 == 31, thread, thread + 1)
    np.testing.assert_array_equal(out.get(), np.arange(6)[:, None] * 10000 + up * 100 + thread // 32 * 32)


def test_a_missing_barrier_shows() -> None:
    code = """
    __global__ void f(float* out) {
        __shared__ float part[64];
        part[threadIdx.x] = threadIdx.x;
        %s
        out[blockIdx.x * 64 + threadIdx.x] = part[63 - threadIdx.x];
    }"""
    expected = np.tile(np.arange(63, -1, -1, dtype=np.float32), 2)
    out = cp.empty(128, np.float32)
    raw(code % "__syncthreads();")((2,), (64,), (out,))
    assert out.get().tolist() == expected.tolist()
    raw(code % "")((2,), (64,), (out,))
    assert out.get().tolist() != expected.tolist()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("if (threadIdx.x < 8) return; __syncthreads();", "never reach"),
        ("if (threadIdx.x < 8) {\n __syncthreads(); } else {\n __syncthreads(); }", "different __syncthreads"),
        ("if (threadIdx.x < 8) __shfl_sync(0xffffffffu, 1, 0);", "never reach"),
        ("if (threadIdx.x < 8) __shfl_sync(0xff00u, 1, 8);", "leaves it out"),
        ("assert(x[0] == 0);", "assert"),
        ("x[16] = 0;", "wrote behind the end of an allocation of 64 bytes"),
        ("x[128] = 0;", "wrote behind the end"),
    ],
)
def test_what_a_gpu_would_hang_on_or_corrupt_is_refused(body: str, why: str) -> None:
    with cp.cuda.using_allocator(cp.cuda.MemoryPool().malloc):  # whose one segment ends where x does
        x = on_device(np.ones(16, np.float32))
    with pytest.raises(Error, match=why):
        raw(f"__global__ void f(float* x) {{ {body} }}")((1,), (32,), (x,))


def test_arguments_are_held_to_their_parameters() -> None:
    kernel = raw("__global__ void f(const float* x, long long n, int k, float s, double d, float* y) { y[0] = n + k; }")
    x, y, good = cp.zeros(4, np.float32), cp.zeros(4, np.float32), (3, np.int32(4), np.float32(1), 2.0)
    kernel((1,), (1,), (x, *good, y))
    assert float(y[0]) == 7
    kernel((1,), (1,), (x.data.ptr, *good, y.data.ptr))
    bad = [
        (x, 3, 4, np.float32(1), 2.0, y),  # a Python int is 8 bytes, the parameter 4
        (x, 3, np.int32(4), 1.0, 2.0, y),  # a Python float is a double
        (x, 3, np.int32(4), np.float32(1), np.float32(2), y),
        (x, np.int32(3), np.int32(4), np.float32(1), 2.0, y),
        (x, 3, np.int32(-4), np.float32(1), 2, y),
        (cp.zeros(4, np.float64), *good, y),
        (np.zeros(4, np.float32), *good, y),
        (None, *good, y),
        (x, *good),
    ]
    for args in bad:
        with pytest.raises(TypeError):
            kernel((1,), (1,), args)
    for grid, block, shared in (((1,), (1025,), 0), ((0,), (1,), 0), ((1, 65536), (1,), 0), ((1,), (1,), 50_000)):
        with pytest.raises(Error):
            kernel(grid, block, (x, *good, y), shared_mem=shared)
    with pytest.raises(Error, match="illegal address"):
        kernel((1,), (1,), (x, *good, 12345))
    with pytest.raises(Error, match="neither in name_expressions"):
        cp.RawModule(code="__global__ void f() {}", name_expressions=["f"]).get_function("g")


def test_a_raw_kernel_races_as_others_do() -> None:
    read = raw("__global__ void f(const float* x, float* y) { y[0] = x[0]; }")
    x, one, two = cp.empty(4, np.float32), stream(), stream()
    with one:
        x.fill(1)
    with two, pytest.raises(Race, match=r"f \(test_standin.py"):
        read((1,), (1,), (x, cp.empty(1, np.float32)))


# -- products ---------------------------------------------------------------------------------------------

COMPUTE = {np.float64: cublas.CUBLAS_COMPUTE_64F}
KINDS = {np.dtype(np.float32): 0, np.dtype(np.float64): 1, np.dtype(np.float16): 2, BFLOAT16: 14}


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


def test_gemm_refuses_what_cublas_refuses() -> None:
    a, b, c = (cp.zeros((2, 4, 4), np.float32) for _ in range(3))
    ones, good = np.array([1, 0], np.float32), dict(dims=(4, 4, 4, 2), ld=(4, 4, 4), steps=(16, 16, 16))
    gemm(a, b, c, **good, factors=ones)
    for wrong in (dict(ld=(3, 4, 4)), dict(ld=(4, 4, 2)), dict(steps=(16, 16, 8)), dict(dims=(4, -1, 4, 2))):
        with pytest.raises(cublas.CUBLASError, match="INVALID_VALUE"):
            gemm(a, b, c, **{**good, **wrong}, factors=ones)
    for x, y, z, factors in (
        (a, cp.zeros((2, 4, 4), np.float16), c, ones),
        (a, b, cp.zeros((2, 4, 4), np.float16), ones),
        (a, b, c, ones.astype(np.float64)),
    ):
        with pytest.raises(cublas.CUBLASError, match="NOT_SUPPORTED"):
            gemm(x, y, z, **good, factors=factors)
    with pytest.raises(Error, match="illegal address"):
        gemm(a, b, c, **{**good, "dims": (4, 4, 4, 3)}, factors=ones)
    caught: list[str] = []
    handle = cp.cuda.device.get_cublas_handle()

    def elsewhere() -> None:
        assert handle != cp.cuda.device.get_cublas_handle()
        try:
            cublas.setMathMode(handle, 0)
        except cublas.CUBLASError as error:
            caught.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "another thread's" in caught[0]


# -- NCCL -------------------------------------------------------------------------------------------------


@pytest.fixture
def ring() -> Any:
    """Three devices, each with a communicator, a stream and the array [r, r+1, ..., r+5]."""
    cp.standin.set_device_count(3)
    members = []
    for rank, communicator in enumerate(nccl.NcclCommunicator.initAll(3)):
        with cp.cuda.Device(rank):
            own = stream()
            with own:
                members.append(
                    (
                        communicator,
                        own,
                        on_device(np.arange(rank, rank + 6, dtype=np.float32)),
                        cp.zeros(18, np.float32),
                    )
                )
    return members


def test_nccl_collectives(ring: Any) -> None:
    inputs = [np.arange(rank, rank + 6) for rank in range(3)]
    total = np.sum(inputs, axis=0)
    for name, args, expected in (
        ("allReduce", (6, nccl.NCCL_FLOAT32, nccl.NCCL_SUM), [total] * 3),
        ("allReduce", (6, nccl.NCCL_FLOAT32, nccl.NCCL_MAX), [inputs[2]] * 3),
        ("reduceScatter", (2, nccl.NCCL_FLOAT32, nccl.NCCL_AVG), np.split(total / 3, 3)),
        ("allGather", (6, nccl.NCCL_FLOAT32), [np.concatenate(inputs)] * 3),
        ("broadcast", (6, nccl.NCCL_FLOAT32, 1), [inputs[1]] * 3),
        ("reduce", (6, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 2), [None, None, total]),
    ):
        nccl.groupStart()
        for communicator, own, x, out in ring:
            getattr(communicator, name)(x.data.ptr, out.data.ptr, *args, own.ptr)
        nccl.groupEnd()
        for (_, own, _, out), values in zip(ring, expected, strict=True):
            if values is not None:
                np.testing.assert_array_equal(out.get(stream=own)[: len(values)], values.astype(np.float32))


def test_nccl_refuses_what_would_hang(ring: Any) -> None:
    cp.standin.set_patience(0.2)
    nccl.groupStart()
    for rank, (communicator, own, x, out) in enumerate(ring):
        communicator.allReduce(x.data.ptr, out.data.ptr, 5 + (rank == 2), nccl.NCCL_FLOAT32, nccl.NCCL_SUM, own.ptr)
    with pytest.raises(Error, match=r"rank 2 calls .*'allReduce', 6"):
        nccl.groupEnd()
    alone = nccl.NcclCommunicator.initAll(2)
    communicator, own, x, out = ring[0]
    with pytest.raises(Error, match="outside groupStart"):
        alone[0].allReduce(x.data.ptr, out.data.ptr, 6, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, own.ptr)
    with pytest.raises(nccl.NcclError, match="Duplicate GPU"):
        nccl.NcclCommunicator.initAll([0, 0])


def test_nccl_from_one_thread_each() -> None:
    cp.standin.set_device_count(2)
    unique, results = nccl.get_unique_id(), {}

    def rank(r: int) -> None:
        with cp.cuda.Device(r):
            communicator, x = nccl.NcclCommunicator(2, unique, r), on_device(np.full(4, r + 1, np.float16))
            ptr, own = x.data.ptr, cp.cuda.get_current_stream().ptr
            communicator.allReduce(ptr, ptr, 4, nccl.NCCL_FLOAT16, nccl.NCCL_SUM, own)
            results[r] = x.get().tolist()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [3.0] * 4, 1: [3.0] * 4}
