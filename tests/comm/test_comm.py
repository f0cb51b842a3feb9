"""Collectives: values with ==, traffic to the byte, buckets, groups, messages, and what is refused.

Oracles are plain NumPy: a direct sum is rank order in the compute dtype, rounded once; a ring's is the
order c+1, ..., c with a rounding at each hop.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerosim import dtypes
from zerosim.backends.numpy.backend import NumpyBackend
from zerosim.comm.algorithms.execution import RangeCut, SliceCut, SplitCut, buckets, spans
from zerosim.comm.collectives import Comm
from zerosim.comm.runtime import Context, World, launch, launch_alone
from zerosim.comm.transports.rounds import Call, Exchange, Key
from zerosim.comm.transports.threads import ThreadTransport
from zerosim.device.device import Buffer, Device, Kind
from zerosim.device.events import Alloc, Kernel, Launch, Message, Scope, Wait
from zerosim.dtypes import DType, bf16, fp16, fp32, fp64, int64, uint8
from zerosim.errors import InputError, Mismatch
from zerosim.verbs import VERBS

SIZES = (1, 2, 3, 4, 8)


def numpy_type(dtype: DType) -> Any:
    return NumpyBackend.empty((1,), dtype).dtype


def make(ctx: Context, values: Any, dtype: DType = fp32, kind: Kind = Kind.TEMP) -> Buffer:
    values = np.asarray(values)
    buffer = ctx.device.alloc(values.shape, dtype, kind)
    ctx.device.backend.from_host(values, buffer.array)
    return buffer


def rows(num_ranks: int, numel: int, dtype: DType, seed: int = 0) -> Any:
    """One array per rank, in the dtype."""
    values = np.random.default_rng(seed).standard_normal((num_ranks, numel))
    return values.astype(numpy_type(dtype))


def combined(parts: Any, op: str) -> Any:
    """Rank order, in the compute dtype, rounded once."""
    compute = np.float64 if parts[0].dtype == np.float64 else np.float32
    total = parts[0].astype(compute)
    for part in parts[1:]:
        total = np.maximum(total, part.astype(compute)) if op == "max" else total + part.astype(compute)
    return (total / compute(len(parts)) if op == "avg" else total).astype(parts[0].dtype)


def ringed(parts: Any, op: str, last: int) -> Any:
    """The order last+1, ..., last, rounded to the wire's dtype at each hop; avg divides at the end."""
    n = len(parts)
    total = parts[(last + 1) % n]
    for hop in range(2, n + 1):
        total = combined([total, parts[(last + hop) % n]], "max" if op == "max" else "sum")
    return combined([total], "avg") if op != "avg" else divided(total, n)


def divided(total: Any, n: int) -> Any:
    compute = np.float64 if total.dtype == np.float64 else np.float32
    return (total.astype(compute) / compute(n)).astype(total.dtype)


def expected(parts: Any, op: str, algorithm: str, owner: int) -> Any:
    return ringed(parts, op, owner) if algorithm == "ring" else combined(parts, op)


def same(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def chunk_edges(numel: int, n: int) -> list[int]:
    step = -(-numel // n)
    return [min(j * step, numel) for j in range(n + 1)]


# -- values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_running", [1, 2])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", dtypes.FLOATING, ids=str)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "pairs"])
def test_values(algorithm: str, dtype: DType, n: int, max_running: int) -> None:
    c, odd = 5, 7 * n - 3
    whole, uneven = rows(n, n * c, dtype), rows(n, odd, dtype, seed=1)

    def program(ctx: Context) -> None:
        r, comm = ctx.rank, ctx.comm
        for op in ("avg", "sum", "max"):
            full = make(ctx, whole[r], dtype)
            out = comm.reduce_scatter(full, op=op)
            assert same(out.array, expected(whole[:, r * c : (r + 1) * c], op, algorithm, r))
            assert same(full.array, whole[r])  # the input is left alone

            mine = full[r * c : (r + 1) * c]
            assert comm.reduce_scatter(full, out=mine, op=op) is mine
            assert same(full.array[r * c : (r + 1) * c], out.array)  # in place: the same bits

            edges = chunk_edges(odd, n)
            want = [expected(uneven[:, edges[j] : edges[j + 1]], op, algorithm, j) for j in range(n)]
            buffer = make(ctx, uneven[r], dtype)
            assert comm.all_reduce(buffer, op=op) is buffer
            assert same(buffer.array, np.concatenate(want))

            for dst in {0, n - 1}:
                buffer = make(ctx, uneven[r], dtype)
                comm.reduce(buffer, dst=dst, op=op)
                assert same(buffer.array, expected(uneven, op, algorithm, dst) if r == dst else uneven[r])

        shard = make(ctx, whole[r, :c], dtype)
        gathered = comm.all_gather(shard)
        assert same(gathered.array, whole[:, :c].reshape(-1))
        assert gathered.storage is not shard.storage
        assert not np.may_share_memory(gathered.array, shard.array)
        again = ctx.device.alloc((n * c,), dtype, Kind.TEMP)
        ctx.device.backend.copy(shard.array, again.array[r * c : (r + 1) * c])
        comm.all_gather(again[r * c : (r + 1) * c], out=again)  # in place
        assert same(again.array, gathered.array)

        for src in {0, n - 1}:
            buffer = make(ctx, uneven[r], dtype)
            comm.broadcast(buffer, src=src)
            assert same(buffer.array, uneven[src])

    launch(program, World(n, max_running, algorithm=algorithm))


PARTS: dict[str, Callable[[int, int], int]] = {
    "even": lambda i, j: 6,
    "uneven": lambda i, j: (3 * i + 5 * j + i * j) % 4,  # some are empty
    "one sends": lambda i, j: j + 1 if i == 0 else 0,
    "nothing": lambda i, j: 0,
}
"""Elements that go from rank i to rank j."""


@pytest.mark.parametrize("case", PARTS)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("algorithm", ["direct", "ring", "pairs"])
def test_all_to_all_is_a_transpose(algorithm: str, n: int, case: str) -> None:
    """Bits, bytes to the byte, and the same record on shapes alone; with and without split sizes and an `out`."""
    sent = [[PARTS[case](i, j) for j in range(n)] for i in range(n)]
    received = [list(column) for column in zip(*sent, strict=True)]
    edges = [np.cumsum([0, *sizes]) for sizes in sent]
    formats = (fp64, fp32, bf16, int64, uint8)
    data = {d: np.random.default_rng(n).integers(0, 250, (n, 100)).astype(numpy_type(d)) for d in formats}

    def program(ctx: Context) -> Any:
        r, found = ctx.rank, []
        sizes = dict(input_split_sizes=sent[r], output_split_sizes=received[r])
        for dtype, values in data.items():
            for named in ({}, sizes)[case in ("uneven", "one sends") :]:
                for out in (None, ctx.device.alloc((sum(received[r]),), dtype, Kind.TEMP)):
                    buffer = make(ctx, values[r, : sum(sent[r])], dtype)
                    result = ctx.comm.launch_all_to_all(buffer, out, Kind.COMM, **named).wait()  # type: ignore[arg-type]
                    assert result is out or out is None
                    found.append((dtype, buffer.array, result.array))
        events = [e for e in ctx.device.recorder.events if isinstance(e, Alloc | Launch | Message | Wait)]
        return found, [event._replace(scope=Scope(0)) for event in events]

    for r, (found, events) in enumerate(launch(program, World(n, 2, algorithm=algorithm))):
        for dtype, buffer, result in found:
            parts = [data[dtype][j, edges[j][r] : edges[j][r + 1]] for j in range(n)]
            assert same(result, np.concatenate(parts))
            assert same(buffer, data[dtype][r, : sum(sent[r])])  # the input is left alone
        launches = [e for e in events if isinstance(e, Launch)]
        for (dtype, _, _), e in zip(found, launches, strict=True):
            out, into, own = sum(sent[r]), sum(received[r]), sent[r][r]
            numels = max(out, into), out - own, into - own
            assert (e.payload_bytes, e.sent_bytes, e.received_bytes) == tuple(m * dtype.itemsize for m in numels)
            to = {m.peer: m.nbytes * m.count for m in events if isinstance(m, Message) and m.work == e.work}
            peers = {j: size * dtype.itemsize for j, size in enumerate(sent[r]) if size and j != r}
            each = {-1: sum(peers.values())} if len(peers) == n - 1 and len(set(peers.values())) == 1 else peers
            assert to == (peers if algorithm == "ring" else each)
        assert launch_alone(program, World(n, algorithm=algorithm, backend="meta"), r)[1] == events


def test_split_sizes_that_do_not_fit_are_a_mismatch() -> None:
    """Two ranks agree each with itself and not with the other; what is even on one and uneven on the other, too."""

    def unlike(ctx: Context) -> None:
        sizes = [[1, 2], [2, 1]][ctx.rank]
        ctx.comm.all_to_all(make(ctx, np.zeros(3)), input_split_sizes=sizes, output_split_sizes=[1, 1])

    def half(ctx: Context) -> None:
        sizes = dict(input_split_sizes=[2, 2], output_split_sizes=[2, 2]) if ctx.rank else {}
        ctx.comm.all_to_all(make(ctx, np.zeros(4)), **sizes)  # type: ignore[arg-type]

    for algorithm in ("direct", "ring"):
        with pytest.raises(Mismatch, match=r"member 1 of the group sends 2 elements to member 0, which expects 1"):
            launch(unlike, World(2, algorithm=algorithm))
        with pytest.raises(Mismatch, match=r"called all_to_all (uneven of fp32|of fp32 \(4,\)) in init but"):
            launch(half, World(2, algorithm=algorithm))


def test_any_shape_and_empty_buffers() -> None:
    def program(ctx: Context) -> None:
        for shape in ((2, 3, 4), (), (1,), (0,), (3, 0)):
            buffer = make(ctx, np.full(shape, float(ctx.rank)))
            ctx.comm.all_reduce(buffer, op="sum")
            assert np.array_equal(buffer.array, np.full(shape, 6.0))
            ctx.comm.broadcast(make(ctx, np.zeros(shape)), src=1)
        assert ctx.comm.all_gather(make(ctx, np.zeros(0))).shape == (0,)
        assert ctx.comm.reduce_scatter(make(ctx, np.zeros(0))).shape == (0,)
        tokens = make(ctx, [3, 4], int64)
        assert list(ctx.comm.all_reduce(tokens, op="sum").array) == [12, 16]

    for algorithm in ("direct", "ring", "pairs"):
        launch(program, World(4, algorithm=algorithm))


def test_half_sums_gather_in_fp32_and_round_once() -> None:
    def program(ctx: Context) -> float:
        value = 2048.0 if ctx.rank == 0 else 0.75  # 2048 + 0.75 is 2048 in fp16, at every hop
        return float(ctx.comm.all_reduce(make(ctx, [value], fp16), op="sum").array[0])

    assert launch(program, World(4, algorithm="direct")) == [2050.0] * 4
    assert launch(program, World(4, algorithm="ring")) == [2050.0] * 4  # 0.75 * 3 first, then 2048

    def overflow(ctx: Context) -> float:
        return float(ctx.comm.all_reduce(make(ctx, [60000.0], fp16), op="sum").array[0])

    assert launch(overflow, World(2)) == [np.inf] * 2


# -- traffic ----------------------------------------------------------------------------------------


class Traffic:
    """One rank's events of one call."""

    def __init__(self, ctx: Context, before: int) -> None:
        events = ctx.device.recorder.events[before:]
        (self.launch,) = [e for e in events if isinstance(e, Launch)]
        self.messages = [(e.peer, e.nbytes, e.count) for e in events if isinstance(e, Message)]
        self.kernels = [e for e in events if isinstance(e, Kernel)]
        (wait,) = [e for e in events if isinstance(e, Wait)]
        assert wait.work == self.launch.work
        assert sum(nbytes * count for _, nbytes, count in self.messages) == self.launch.sent_bytes

    @property
    def bytes(self) -> tuple[int, int, int]:
        return self.launch.payload_bytes, self.launch.sent_bytes, self.launch.received_bytes


def traffic(algorithm: str, n: int, call: Any) -> list[Traffic]:
    def program(ctx: Context) -> Traffic:
        before = len(ctx.device.recorder.events)
        call(ctx)
        return Traffic(ctx, before)

    return launch(program, World(n, algorithm=algorithm))


@pytest.mark.parametrize("n", SIZES)
def test_an_all_reduce_by_all_pairs_sends_whole_buffers(n: int) -> None:
    """Every rank sends L to each other one and adds all of it; other verbs are direct's."""
    nbytes = 4 * 10
    for own in traffic("pairs", n, lambda ctx: ctx.comm.all_reduce(make(ctx, np.ones(10)))):
        assert own.bytes == (nbytes, (n - 1) * nbytes, (n - 1) * nbytes)
        assert own.messages == ([(-1, nbytes, n - 1)] if n > 1 else [])
        work = [(kernel.flops, kernel.bytes_read, kernel.bytes_written) for kernel in own.kernels]
        assert work == ([((n - 1) * 10, n * nbytes, nbytes)] if n > 1 else [])
    for call in (
        lambda ctx: ctx.comm.reduce_scatter(make(ctx, np.ones(3 * n))),
        lambda ctx: ctx.comm.all_gather(make(ctx, np.ones(3))),
        lambda ctx: ctx.comm.broadcast(make(ctx, np.ones(7)), src=0),
        lambda ctx: ctx.comm.reduce(make(ctx, np.ones(7)), dst=0),
    ):
        pairs, direct = traffic("pairs", n, call), traffic("direct", n, call)
        assert [(own.bytes, own.messages) for own in pairs] == [(own.bytes, own.messages) for own in direct]


@pytest.mark.parametrize("n", SIZES)
def test_traffic_of_equal_chunks(n: int) -> None:
    c, item = 6, 4
    each = (n - 1) * c * item
    for algorithm in ("direct", "ring"):
        scattered = traffic(algorithm, n, lambda ctx: ctx.comm.reduce_scatter(make(ctx, np.zeros(n * c))))
        gathered = traffic(algorithm, n, lambda ctx: ctx.comm.all_gather(make(ctx, np.zeros(c))))
        reduced = traffic(algorithm, n, lambda ctx: ctx.comm.all_reduce(make(ctx, np.zeros(n * c))))
        for r in range(n):
            peer = -1 if algorithm == "direct" else (r + 1) % n
            once = [(peer, c * item, n - 1)] if n > 1 else []
            assert scattered[r].bytes == gathered[r].bytes == (n * c * item, each, each)
            assert reduced[r].bytes == (n * c * item, 2 * each, 2 * each)
            assert scattered[r].messages == gathered[r].messages == once
            assert reduced[r].messages == once * 2
            touched = (n + 1) * c * item if algorithm == "direct" else 3 * each
            sums = [("reduce", (n - 1) * c, touched)] if n > 1 else []
            for t in (scattered[r], reduced[r]):
                assert [(k.name, k.flops, k.bytes_read + k.bytes_written) for k in t.kernels] == sums
            assert not gathered[r].kernels


@pytest.mark.parametrize("n", SIZES)
def test_traffic_of_rooted_collectives(n: int) -> None:
    nbytes, root = 7 * 4, n // 2
    numel = 7

    sent = traffic("direct", n, lambda ctx: ctx.comm.broadcast(make(ctx, np.zeros(numel)), src=root))
    got = traffic("direct", n, lambda ctx: ctx.comm.reduce(make(ctx, np.zeros(numel)), dst=root))
    for r in range(n):
        if r == root:
            assert sent[r].bytes == (nbytes, (n - 1) * nbytes, 0)
            assert sent[r].messages == ([(-1, nbytes, n - 1)] if n > 1 else [])
            assert got[r].bytes == (nbytes, 0, (n - 1) * nbytes)
            sums = [((n - 1) * numel, (n + 1) * nbytes)] if n > 1 else []
            assert [(k.flops, k.bytes_read + k.bytes_written) for k in got[r].kernels] == sums
        else:
            assert sent[r].bytes == (nbytes, 0, nbytes)
            assert got[r].bytes == (nbytes, nbytes, 0)
            assert got[r].messages == [(root, nbytes, 1)]

    sent = traffic("ring", n, lambda ctx: ctx.comm.broadcast(make(ctx, np.zeros(numel)), src=root))
    got = traffic("ring", n, lambda ctx: ctx.comm.reduce(make(ctx, np.zeros(numel)), dst=root))
    for r in range(n):
        last, right = (root - 1) % n, (r + 1) % n
        assert sent[r].bytes == (nbytes, nbytes * (r != last), nbytes * (r != root))
        assert sent[r].messages == ([(right, nbytes, 1)] if r != last else [])
        first = (root + 1) % n
        assert got[r].bytes == (nbytes, nbytes * (r != root), nbytes * (r != first))
        assert got[r].messages == ([(right, nbytes, 1)] if r != root else [])
        assert [(k.flops, k.bytes_read + k.bytes_written) for k in got[r].kernels] == (
            [(numel, 3 * nbytes)] if r != first else []
        )


@pytest.mark.parametrize("numel", [0, 1, 5, 8, 9, 10, 11])
def test_traffic_of_uneven_chunks(numel: int) -> None:
    n, item = 4, 2
    edges = chunk_edges(numel, n)
    size = [edges[j + 1] - edges[j] for j in range(n)]

    direct = traffic("direct", n, lambda ctx: ctx.comm.all_reduce(make(ctx, np.zeros(numel), fp16)))
    ring = traffic("ring", n, lambda ctx: ctx.comm.all_reduce(make(ctx, np.zeros(numel), fp16)))
    for r in range(n):
        others = numel - size[r]
        moved = (others + (n - 1) * size[r]) * item
        assert direct[r].bytes == (numel * item, moved, moved)
        scatter = Counter(size[j] for j in range(n) if j != r and size[j])
        assert direct[r].messages == [(-1, s * item, k) for s, k in scatter.items()] + (
            [(-1, size[r] * item, n - 1)] if size[r] else []
        )
        left, right = (r - 1) % n, (r + 1) % n
        sent, received = 2 * numel - size[r] - size[right], 2 * numel - size[left] - size[r]
        assert ring[r].bytes == (numel * item, sent * item, received * item)
        assert {peer for peer, _, _ in ring[r].messages} <= {right}


class Spy(NumpyBackend):
    """Sees which rank's memory every copy and sum reads and writes."""

    def __init__(self) -> None:
        self.owned: list[tuple[int, int, int]] = []
        self.moved: Counter[tuple[int, int]] = Counter()
        self.num_moves: Counter[tuple[int, int]] = Counter()

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:  # type: ignore[override]
        array = NumpyBackend.empty(shape, dtype)
        start = array.__array_interface__["data"][0]
        self.owned.append((start, start + array.nbytes, int(threading.current_thread().name.split()[1])))
        return array

    def owner(self, array: Any) -> int:
        address = array.__array_interface__["data"][0]
        return next(rank for start, stop, rank in reversed(self.owned) if start <= address < stop)

    def note(self, source: Any, out: Any) -> None:
        pair = self.owner(source), self.owner(out)
        if pair[0] != pair[1]:
            self.moved[pair] += source.nbytes
            self.num_moves[pair] += 1

    def copy(self, source: Any, out: Any) -> None:  # type: ignore[override]
        self.note(source, out)
        NumpyBackend.copy(source, out)

    def reduce(self, parts: Any, op: str, out: Any) -> None:  # type: ignore[override]
        for part in parts:
            self.note(part, out)
        NumpyBackend.reduce(parts, op, out)


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
@pytest.mark.parametrize("verb", sorted(set(VERBS) - {"recv", "barrier"}))
def test_what_is_recorded_is_what_moves(monkeypatch: pytest.MonkeyPatch, verb: str, algorithm: str) -> None:
    n, spy = 4, Spy()
    monkeypatch.setattr("zerosim.comm.runtime.make_backend", lambda name: spy)

    def call(ctx: Context) -> None:
        if verb == "send":
            if ctx.rank == 1:
                ctx.comm.send(make(ctx, np.zeros(8)), dst=3)
            else:
                ctx.comm.recv((8,), fp32, src=1) if ctx.rank == 3 else ctx.comm.subgroup([ctx.rank]).barrier()
            return
        extra = {"broadcast": {"src": 1}, "reduce": {"dst": 1}}.get(verb, {})
        getattr(ctx.comm, verb)(make(ctx, np.zeros(10 if verb == "all_reduce" else 8)), **extra)

    seen = traffic(algorithm, n, call)
    for r in range(n):
        assert seen[r].launch.sent_bytes == sum(b for (src, _), b in spy.moved.items() if src == r)
        assert seen[r].launch.received_bytes == sum(b for (_, dst), b in spy.moved.items() if dst == r)
        assert sum(k for _, _, k in seen[r].messages) == sum(k for (src, _), k in spy.num_moves.items() if src == r)
    if algorithm == "ring" and verb not in ("send", "all_to_all"):
        assert all(dst == (src + 1) % n for src, dst in spy.moved)


def test_launch_says_what_and_for_whom() -> None:
    def program(ctx: Context) -> None:
        odd = ctx.comm.subgroup([r for r in range(4) if r % 2 == ctx.rank % 2], axis="tensor")
        odd.all_reduce(make(ctx, [1.0], fp64), purpose="control")
        odd.all_reduce(make(ctx, [1.0], fp64))
        ctx.comm.barrier()
        launches = [e for e in ctx.device.recorder.events if isinstance(e, Launch)]
        assert [(e.op, e.dtype, e.purpose, e.axis, e.group, e.sequence) for e in launches] == [
            ("all_reduce", "fp64", "control", "tensor", odd.ranks, 0),
            ("all_reduce", "fp64", "states", "tensor", odd.ranks, 1),
            ("barrier", "", "control", "dp_shard", (0, 1, 2, 3), 0),
        ]
        assert launches[-1].payload_bytes == launches[-1].sent_bytes == 0

    launch(program, World(4))


# -- buckets and coalescing ---------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 6),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    bucket_bytes=st.one_of(st.none(), st.integers(1, 200)),
    algorithm=st.sampled_from(["direct", "ring"]),
    max_running=st.integers(1, 2),
)
def test_buckets_never_change_results(
    n: int, lengths: list[int], bucket_bytes: int | None, algorithm: str, max_running: int
) -> None:
    data = [rows(n, n * c, fp32, seed=i) for i, c in enumerate(lengths)]
    item = 4

    def program(ctx: Context) -> None:
        r, comm, recorder = ctx.rank, ctx.comm, ctx.device.recorder
        fulls = [make(ctx, d[r]) for d in data]
        for out, d, c in zip(comm.reduce_scatter(fulls, op="sum"), data, lengths, strict=True):
            assert same(out.array, expected(d[:, r * c : (r + 1) * c], "sum", algorithm, r))
        shards = [make(ctx, d[r, :c]) for d, c in zip(data, lengths, strict=True)]
        for out, d, c in zip(comm.all_gather(shards), data, lengths, strict=True):
            assert same(out.array, d[:, :c].reshape(-1))
        limit = max(bucket_bytes or 10**9, n * item)
        scatters = [e for e in recorder.events if isinstance(e, Launch)]
        assert all(e.payload_bytes <= limit for e in scatters)
        assert sum(e.payload_bytes for e in scatters) == 2 * n * sum(lengths) * item
        assert sum(e.sent_bytes for e in scatters) == 2 * (n - 1) * sum(lengths) * item
        before = len(recorder.events)
        reduced = comm.all_reduce(fulls, op="sum")
        if algorithm == "direct":
            assert all(same(out.array, combined(d, "sum")) for out, d in zip(reduced, data, strict=True))
        else:
            assert all(
                np.allclose(out.array, combined(d, "sum"), atol=1e-5) for out, d in zip(reduced, data, strict=True)
            )
        launches = [e for e in recorder.events[before:] if isinstance(e, Launch)]
        assert len(launches) == max(1, -(-n * sum(lengths) * item // (limit - limit % (n * item))))
        c, before = lengths[0], len(recorder.events)
        turned = comm.all_to_all(make(ctx, data[0][r]))
        assert same(turned.array, data[0][:, r * c : (r + 1) * c].reshape(-1))
        launches = [e for e in recorder.events[before:] if isinstance(e, Launch)]
        assert all(e.payload_bytes <= limit for e in launches)
        assert sum(e.sent_bytes for e in launches) == (n - 1) * c * item
        one = make(ctx, data[0][r])
        comm.broadcast(one, src=n - 1)
        assert same(one.array, data[0][n - 1])
        comm.reduce(one, dst=0, op="max")
        assert same(one.array, data[0][n - 1])

    launch(program, World(n, max_running, algorithm=algorithm, bucket_bytes=bucket_bytes))


def test_a_list_is_one_call() -> None:
    def program(ctx: Context) -> None:
        buffers = [make(ctx, np.ones(8)), make(ctx, np.ones(4))]
        outs = ctx.comm.reduce_scatter(buffers, kind=Kind.GRAD)
        assert isinstance(outs, list)
        assert [out.shape for out in outs] == [(2,), (1,)]
        assert ctx.comm.all_reduce(buffers) is buffers
        launches = [e for e in ctx.device.recorder.events if isinstance(e, Launch)]
        assert [e.payload_bytes for e in launches] == [48, 48]
        kinds = [e.kind for e in ctx.device.recorder.events if isinstance(e, Alloc)]
        assert kinds[2:] == ["grad", "grad"]

    launch(program, World(4))


def test_ring_takes_two_temporaries_at_most() -> None:
    def temporaries(n: int, bucket_bytes: int | None) -> list[int]:
        def program(ctx: Context) -> list[int]:
            ctx.comm.reduce_scatter(make(ctx, np.ones(n * 6)))
            ctx.comm.all_reduce(make(ctx, np.ones(n * 6)))
            return [e.nbytes for e in ctx.device.recorder.events if isinstance(e, Alloc) and e.kind == "comm"]

        return launch(program, World(n, algorithm="ring", bucket_bytes=bucket_bytes))[0]

    assert [temporaries(n, None) for n in (1, 2, 3, 4, 8)] == [[], [], [24], [24, 24], [24, 24]]
    assert temporaries(4, 4 * 4 * 4) == [16, 16]  # buckets of 4 elements per slice share them


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(0, 8), max_size=4), n=st.integers(1, 5), data=st.data())
def test_cuts_cover_everything_once(lengths: list[int], n: int, data: st.DataObject) -> None:
    total = sum(lengths)
    lo = data.draw(st.integers(0, total))
    hi = data.draw(st.integers(lo, total))
    flat = [(i, k) for i, length in enumerate(lengths) for k in range(length)]
    assert [(i, k) for i, start, stop in spans(lengths, lo, hi) for k in range(start, stop)] == flat[lo:hi]
    limit = data.draw(st.one_of(st.none(), st.integers(1, 9)))
    pieces = list(buckets(total, limit))
    assert [x for a, b in pieces for x in range(a, b)] == list(range(total))
    arrays = [np.arange(length) + 100 * i for i, length in enumerate(lengths)]
    ranges = RangeCut(lengths, n, lo, hi)
    found = [part for j in range(n) for part in ranges.chunk(arrays, j)]
    assert [*np.concatenate([*found, []])] == [100 * i + k for i, k in flat[lo:hi]]
    sizes = [sum(p.size for p in ranges.chunk(arrays, j)) for j in range(n)]
    assert [ranges.size_of(j) for j in range(n)] == sizes
    for j in range(n):
        assert ranges.sizes_but(j) == list(Counter(size for size in sizes[:j] + sizes[j + 1 :] if size).items())
    split = SplitCut(lengths)
    assert [
        *np.concatenate([*(part for j in range(len(lengths)) for part in split.chunk([np.arange(total)], j)), []])
    ] == [*range(total)]
    for j, length in enumerate(lengths):
        assert split.size_of(j) == length
        assert split.sizes_but(j) == list(Counter(lengths[:j] + lengths[j + 1 :]).items())
    tiled = [np.tile(a, n) for a in arrays]
    slices = SliceCut(lengths, n, lo, hi)
    for j in range(n):
        assert [*np.concatenate([*slices.chunk(tiled, j), []])] == [100 * i + k for i, k in flat[lo:hi]]
        assert slices.size_of(j) == hi - lo
        assert slices.sizes_but(j) == [(hi - lo, n - 1)]


# -- works ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_running", [1, 2])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_handles_may_be_waited_in_any_order(algorithm: str, max_running: int) -> None:
    data = rows(4, 16, fp32)

    def program(ctx: Context) -> None:
        r, comm = ctx.rank, ctx.comm
        works: list[Any] = [
            comm.launch_all_reduce(make(ctx, data[r]), op="max"),
            comm.launch_reduce_scatter(make(ctx, data[r]), op="max"),
            comm.launch_all_gather(make(ctx, data[r, :4])),
            comm.launch_broadcast(make(ctx, data[r]), src=2),
            comm.launch_reduce(make(ctx, data[r]), dst=1, op="max"),
        ]
        order = np.random.default_rng(r).permutation(5)  # each rank its own
        got = {int(i): works[i].wait().array for i in order}
        top = data.max(axis=0)
        assert same(got[0], top)
        assert same(got[1], top[r * 4 : r * 4 + 4])
        assert same(got[2], data[:, :4].reshape(-1))
        assert same(got[3], data[2])
        assert same(got[4], top if r == 1 else data[r])
        with pytest.raises(InputError, match="waits twice"):
            works[0].wait()
        waited = [e.work for e in ctx.device.recorder.events if isinstance(e, Wait)]
        launched = [e.work for e in ctx.device.recorder.events if isinstance(e, Launch)]
        assert waited == [w for i in order for w in launched[2 * i : 2 * i + 2]]

    # 64 bytes of payload in buckets of 32: two calls each
    launch(program, World(4, max_running, algorithm=algorithm, bucket_bytes=32))


def test_work_holds_its_buffers_until_it_is_waited_for() -> None:
    def program(ctx: Context) -> None:
        work = ctx.comm.launch_reduce_scatter(make(ctx, np.ones(16)))
        ctx.comm.barrier()
        assert ctx.device.allocator.used_bytes == 64 + 16 + 32  # type: ignore[attr-defined]  # input, output, two temporaries
        out = work.wait()
        assert ctx.device.allocator.used_bytes == out.nbytes == 16  # type: ignore[attr-defined]

    launch(program, World(4, algorithm="ring"))


def test_a_round_drops_what_was_posted() -> None:
    transport = ThreadTransport([Device(0, NumpyBackend())])
    array = np.ones(3)
    seen: list[float] = []
    gone = weakref.ref(array)
    exchange = Exchange((array,), move=lambda inbox: seen.append(inbox(0)[0].sum()))
    round = transport.join(0, Key(0, (0,), 0), Call("sum", "fp64", ()), exchange)
    del exchange
    del array
    assert seen == [3.0]
    assert gone() is None  # though the round is still held
    round.wait(0)


# -- groups -----------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 6),
    seed=st.integers(0, 1000),
    algorithm=st.sampled_from(["direct", "ring"]),
    max_running=st.integers(1, 2),
)
def test_any_subsets_in_any_order(n: int, seed: int, algorithm: str, max_running: int) -> None:
    rng = np.random.default_rng(seed)
    subsets = [sorted(rng.choice(n, size=rng.integers(1, n + 1), replace=False).tolist()) for _ in range(6)]

    def program(ctx: Context) -> None:
        for ranks in subsets:  # overlapping, and in one order for all
            if ctx.rank not in ranks:
                continue
            comm = ctx.comm.subgroup(ranks)
            assert (comm.ranks[comm.rank], comm.size) == (ctx.rank, len(ranks))
            gathered = comm.all_gather(make(ctx, [float(ctx.rank)]))
            assert list(gathered.array) == [float(r) for r in ranks]
            assert comm.all_reduce(make(ctx, [float(ctx.rank)]), op="sum").array[0] == sum(ranks)

    launch(program, World(n, max_running, algorithm=algorithm))


def test_equal_groups_are_one_group() -> None:
    def program(ctx: Context) -> None:
        first, second = ctx.comm.subgroup([0, 1]), ctx.comm.subgroup([1, 0]).subgroup([0, 1])
        a = first.launch_all_reduce(make(ctx, [1.0]), op="sum")
        b = second.launch_all_reduce(make(ctx, [10.0]), op="sum")
        assert (a.wait().array[0], b.wait().array[0]) == (2.0, 20.0)

    launch(program, World(2))


def test_groups_are_checked() -> None:
    def program(ctx: Context) -> None:
        with pytest.raises(InputError, match=r"ranks \[7\] are not in the group"):
            ctx.comm.subgroup([0, 1, 7])
        with pytest.raises(InputError, match="not a member"):
            ctx.comm.subgroup([1 - ctx.rank])
        for kwargs in ({"ranks": [1, 0]}, {"algorithm": "tree"}, {"bucket_bytes": 0}):
            with pytest.raises(InputError):
                Comm(ctx.device, ctx.comm._transport, **{"ranks": [0, 1], **kwargs})  # type: ignore[arg-type]

    launch(program, World(2))


# -- messages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_running", [1, 2])
def test_messages_of_a_line_of_stages(max_running: int) -> None:
    def program(ctx: Context) -> None:
        r, comm = ctx.rank, ctx.comm
        if r > 0:
            x = comm.recv((2, 3), fp16, src=r - 1)
            assert same(x.array, np.full((2, 3), r - 1, np.float16))
            assert (x.dtype, x.storage.device) == (fp16, ctx.device)
        if r < 2:
            comm.send(make(ctx, np.full((2, 3), r), fp16), dst=r + 1)
        events = ctx.device.recorder.events
        launches = [(e.op, e.group, e.sent_bytes, e.received_bytes) for e in events if isinstance(e, Launch)]
        sends, recvs = ("send", (r, r + 1), 12, 0), ("recv", (r - 1, r), 0, 12)
        assert launches == [recvs] * (r > 0) + [sends] * (r < 2)
        assert [(e.peer, e.nbytes, e.count) for e in events if isinstance(e, Message)] == [(r + 1, 12, 1)] * (r < 2)

    launch(program, World(3, max_running))


@pytest.mark.parametrize("max_running", [1, 2])
def test_crossing_messages_and_many_in_flight(max_running: int) -> None:
    def program(ctx: Context) -> None:
        comm, peer = ctx.comm, 1 - ctx.rank
        sent = [comm.launch_send(make(ctx, [10.0 * ctx.rank + i]), dst=peer) for i in range(4)]
        received = [comm.launch_recv((1,), fp32, src=peer) for _ in range(4)]
        comm.all_reduce(make(ctx, [1.0]))  # a collective of the same two ranks is numbered apart
        order = [2, 0, 3, 1] if ctx.rank else [1, 3, 2, 0]
        values = {i: float(received[i].wait().array[0]) for i in order}
        assert values == {i: 10.0 * peer + i for i in range(4)}
        for i in reversed(order):
            sent[i].wait()

    launch(program, World(2, max_running))


def test_members_of_a_subgroup_send_by_index() -> None:
    def program(ctx: Context) -> None:
        if ctx.rank in (1, 3):
            comm = ctx.comm.subgroup([1, 3])
            if comm.rank == 0:
                comm.send(make(ctx, [5.0]), dst=1)
                (message,) = [e for e in ctx.device.recorder.events if isinstance(e, Message)]
                assert message.peer == 3  # records name global ranks
            else:
                assert comm.recv((1,), fp32, src=0).array[0] == 5.0

    launch(program, World(4))


# -- what is refused --------------------------------------------------------------------------------


def test_bad_calls_are_refused_before_joining() -> None:
    foreign: list[Buffer] = []

    def program(ctx: Context) -> None:
        comm = ctx.comm
        eight = make(ctx, np.zeros(8))

        def splits(buffer: Buffer, sent: list[int], received: list[int], out: Buffer | None = None) -> Buffer:
            return comm.all_to_all(buffer, out, input_split_sizes=sent, output_split_sizes=received)

        cases: list[tuple[str, Any]] = [
            ("unknown op 'mean'", lambda: comm.all_reduce(eight, op="mean")),
            ("cannot hold a mean", lambda: comm.all_reduce(make(ctx, [1], int64))),
            ("an empty list", lambda: comm.all_reduce([])),
            ("fp32 and fp16", lambda: comm.all_reduce([eight, make(ctx, [1.0], fp16)])),
            ("strided window", lambda: comm.all_reduce(make(ctx, np.zeros((4, 4)))[:, :2])),
            ("pad it to 8", lambda: comm.reduce_scatter(eight[:7])),
            ("expected one dimension", lambda: comm.reduce_scatter(eight.reshape(2, 4))),
            ("out has shape", lambda: comm.reduce_scatter(eight, out=eight[:3])),
            ("out is fp16", lambda: comm.reduce_scatter(eight, out=make(ctx, np.zeros(4), fp16))),
            ("2 buffers in out", lambda: comm.reduce_scatter(eight, out=[eight, eight])),  # type: ignore[call-overload]
            ("is not its slice", lambda: comm.reduce_scatter(eight, out=eight[2:6])),
            ("out has shape", lambda: comm.all_gather(eight, out=eight)),
            ("shard has shape", lambda: comm.all_gather(eight.reshape(2, 4))),
            ("is not its slice", lambda: comm.all_gather(eight[2:6], out=eight)),
            ("src 2: expected an index in the group, 0 to 1", lambda: comm.broadcast(eight, src=2)),
            ("dst -1", lambda: comm.reduce(eight, dst=-1)),
            ("dst 9", lambda: comm.send(eight, dst=9)),
            ("src 9", lambda: comm.recv((1,), fp32, src=9)),
            ("pad it to 8", lambda: comm.all_to_all(eight[:7])),
            ("expected one dimension", lambda: comm.all_to_all(eight.reshape(2, 4))),
            ("out has shape", lambda: comm.all_to_all(eight, eight[:4])),
            ("out is fp16", lambda: comm.all_to_all(eight, make(ctx, np.zeros(8), fp16))),
            ("out overlaps the buffer", lambda: comm.all_to_all(eight, eight)),
            ("out overlaps the buffer", lambda: comm.all_to_all(eight[:6], eight[2:])),
            ("pass both, or neither", lambda: comm.all_to_all(eight, input_split_sizes=[4, 4])),
            ("expected 2 numbers", lambda: splits(eight, [8], [4, 4])),
            ("none below 0", lambda: splits(eight, [4, 4], [9, -1])),
            (r"add up to 7, and the buffer has shape \(8,\)", lambda: splits(eight, [4, 3], [4, 4])),
            (r"shape \(2, 4\)", lambda: splits(eight.reshape(2, 4), [4, 4], [4, 4])),
            ("sends itself", lambda: splits(eight, [3, 5], [5, 3])),
            ("out has shape", lambda: splits(eight, [4, 4], [4, 4], eight[:4])),
            ("to or from itself", lambda: comm.send(eight, dst=comm.rank)),
        ]
        for match, call in cases:
            with pytest.raises(InputError, match=match) as caught:
                call()
            assert f"rank {ctx.rank}" in str(caught.value)
        foreign.append(eight)
        comm.barrier()  # nobody had joined anything
        with pytest.raises(InputError, match=f"lies on rank {1 - ctx.rank}'s device"):
            comm.all_reduce(foreign[1 - ctx.rank])
        comm.barrier()
        foreign.clear()

    launch(program, World(2))
