"""Launching: turns, results, failures, the end of a run; and that nothing outlives it."""

from __future__ import annotations

import _thread
import gc
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from processes import SECONDS, ended, posix, started
from test_comm import make

from zerosim.comm import rank_status, runtime
from zerosim.comm.runtime import Context, World, launch
from zerosim.comm.scheduler import Scheduler
from zerosim.device.device import Buffer, Device, Kind, Phase
from zerosim.device.events import Alloc, Event, Free, Kernel, Launch, Mark
from zerosim.dtypes import fp16, fp32
from zerosim.errors import Aborted, CommError, Deadlock, InputError, LateRank, Mismatch, OutOfMemory, RankFailed


def work(ctx: Context, buffer: Buffer) -> None:
    ctx.device.kernel(buffer.numel, ctx.device.backend.add, buffer.array, 1.0, buffer.array)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed run waits for its ranks for as long as the machine takes to end them: whoever hears nothing is seen."""
    monkeypatch.setattr(runtime, "GRACE_S", SECONDS)


def rank_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]


def left_until(stop: threading.Event) -> list[str]:
    """The ranks that a run left, which end once `stop` is set."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    stop.set()
    for thread in threads:
        thread.join(SECONDS)
    return [thread.name for thread in threads]


# -- worlds and results -----------------------------------------------------------------------------


def test_results_come_in_rank_order() -> None:
    assert launch(lambda ctx: (ctx.rank, ctx.world_size, ctx.comm.size), World(3)) == [(r, 3, 3) for r in range(3)]
    assert rank_threads() == []


@pytest.mark.parametrize(
    "bad",
    [
        {"ranks": 0},
        {"ranks": -1},
        {"ranks": 2.0},
        {"ranks": True},
        {"ranks": 2, "max_running": 0},
        {"ranks": 2, "backend": "torch"},
        {"ranks": 2, "algorithm": "tree"},
        {"ranks": 2, "bucket_bytes": 0},
        {"ranks": 2, "capacity": 0},
        {"ranks": 2, "timeout_s": 0.0},
        {"ranks": 2, "timeout_s": float("nan")},
    ],
    ids=str,
)
def test_bad_worlds_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=list(bad)[-1]):
        World(**bad)


def test_world_reaches_the_ranks() -> None:
    def program(ctx: Context) -> tuple[Any, ...]:
        return ctx.comm.algorithm, ctx.comm.bucket_bytes, ctx.device.allocator.capacity, ctx.device.recorder.enabled

    world = World(2, algorithm="ring", bucket_bytes=64, capacity=1000, record=False)
    assert launch(program, world) == [("ring", 64, 1000, False)] * 2


@pytest.mark.quick(1)
@pytest.mark.parametrize("n", [256, 1024])
def test_many_ranks(n: int) -> None:
    before = threading.stack_size()

    def program(ctx: Context) -> float:
        return float(ctx.comm.all_reduce(make(ctx, [1.0, 2.0]), op="sum").array[1])

    assert launch(program, World(n)) == [2.0 * n] * n
    assert threading.stack_size() == before


def test_blas_is_held_to_one_thread() -> None:
    def threads() -> list[int]:
        return [lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]

    before = threads()
    assert set(launch(lambda ctx: max(threads(), default=1), World(2))) == {1}
    assert threads() == before


def test_readers_get_each_rank_its_events() -> None:
    class Marks:
        def __init__(self) -> None:
            self.names: list[str] = []

        def read(self, events: list[Event]) -> None:
            self.names += [e.name for e in events if isinstance(e, Mark)]

    marks = [Marks() for _ in range(3)]

    def program(ctx: Context) -> None:
        ctx.device.mark(f"start {ctx.rank}")
        ctx.device.recorder.drain()
        ctx.device.mark("end")

    launch(program, World(3), readers=lambda rank: (marks[rank],))
    assert [m.names for m in marks] == [[f"start {r}", "end"] for r in range(3)]


# -- turns --------------------------------------------------------------------------------------------


def test_one_permit_gives_one_order() -> None:
    def trace() -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []

        def program(ctx: Context) -> None:
            for i in range(3):
                seen.append((i, ctx.rank))
                ctx.comm.barrier()
            pair = ctx.comm.subgroup([r for r in range(4) if r // 2 == ctx.rank // 2])
            seen.append((3, ctx.rank))
            pair.barrier()
            seen.append((4, ctx.rank))

        launch(program, World(4))
        return seen

    # The last to join goes on; those it wakes follow in rank order.
    first = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 0), (1, 1), (1, 2), (2, 2), (2, 0), (2, 1), (2, 3)]
    assert trace()[:12] == first
    assert len({tuple(trace()) for _ in range(5)}) == 1


@pytest.mark.parametrize("max_running", [1, 2, 3])
def test_no_more_than_k_run_side_by_side(max_running: int) -> None:
    lock, all_run = threading.Lock(), threading.Event()
    running, most = 0, 0

    def program(ctx: Context) -> None:
        nonlocal running, most
        for _ in range(3):
            with lock:
                running += 1
                most = max(most, running)
                if running == max_running:
                    all_run.set()
            all_run.wait(SECONDS)
            with lock:
                running -= 1
            ctx.comm.barrier()

    launch(program, World(5, max_running))
    assert most == max_running


def busy(ctx: Context) -> None:
    """A bit of everything that a step does."""
    comm, device, n = ctx.comm, ctx.device, ctx.world_size
    for step in range(3):
        with device.scope(step=step, phase=Phase.BACKWARD, unit="h.0"):
            full = make(ctx, np.full(4 * n, ctx.rank + 1.0), fp16)
            work(ctx, full)
            shard = comm.reduce_scatter(full)
            pending = comm.launch_all_gather(shard)
            del full, shard
            half = comm.subgroup([r for r in range(n) if r % 2 == ctx.rank % 2])
            half.all_reduce([make(ctx, np.ones(3)), make(ctx, np.ones(5))], op="max")
            work(ctx, pending.wait())
        comm.launch_send(make(ctx, [1.0]), dst=(ctx.rank + 1) % n)
        comm.recv((1,), fp32, src=(ctx.rank - 1) % n)
        device.mark("after_step")
    comm.barrier()


def history(device: Device) -> list[Event]:
    return device.recorder.history + device.recorder.events


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_a_ranks_record_does_not_depend_on_turns(algorithm: str) -> None:
    def program(ctx: Context) -> Device:
        busy(ctx)
        return ctx.device

    def records(max_running: int) -> list[list[Event]]:
        world = World(4, max_running, algorithm=algorithm, bucket_bytes=16, keep_events=True)
        return [history(device) for device in launch(program, world)]

    taking_turns = records(1)
    assert {type(event) for event in taking_turns[0]} >= {Alloc, Free, Kernel, Launch, Mark}
    for _ in range(3):
        assert records(2) == taking_turns
    assert records(4) == taking_turns


@pytest.mark.quick(1)
@pytest.mark.parametrize("max_running", [1, 2])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_every_byte_dies_without_the_garbage_collector(algorithm: str, max_running: int) -> None:
    def program(ctx: Context) -> Device:
        busy(ctx)
        ctx.comm.launch_all_reduce(make(ctx, np.ones(9)))  # never waited for
        return ctx.device

    gc.collect()
    gc.disable()
    try:
        devices = launch(program, World(4, max_running, algorithm=algorithm, keep_events=True))
        assert [device.allocator.used_bytes for device in devices] == [0] * 4  # type: ignore[attr-defined]
        for device in devices:
            born = {event.id for event in history(device) if isinstance(event, Alloc)}
            assert born == {event.id for event in history(device) if isinstance(event, Free)}
        buffers = [o for o in gc.get_objects() if type(o) is Buffer]
        assert not [buffer for buffer in buffers if buffer.device in devices]
    finally:
        gc.enable()


# -- failures -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("max_running", [1, 2, 4])
def test_a_rank_that_dies_ends_the_run(max_running: int) -> None:
    aborted: list[int] = []

    def program(ctx: Context) -> None:
        with ctx.device.phase(Phase.BACKWARD), ctx.device.scope(unit="h.1"):
            ctx.comm.barrier()
            if ctx.rank == 2:
                raise ValueError("no such thing")
            try:
                ctx.comm.barrier()
            except Aborted:
                aborted.append(ctx.rank)
                raise

    with pytest.raises(RankFailed) as caught:
        launch(program, World(5, max_running))
    assert str(caught.value) == "rank 2 failed in backward of h.1: ValueError: no such thing"
    assert caught.value.rank == 2
    assert isinstance(caught.value.__cause__, ValueError)
    assert len(aborted) == len(set(aborted))
    assert rank_threads() == []


@pytest.mark.usefixtures("patient")
def test_running_ranks_see_the_end_at_their_next_kernel() -> None:
    work_on = threading.Barrier(3)

    def program(ctx: Context) -> None:
        buffer = make(ctx, [0.0])
        work(ctx, buffer)
        work_on.wait(SECONDS)
        if ctx.rank == 0:
            raise ValueError("enough")
        while True:
            work(ctx, buffer)

    with pytest.raises(RankFailed, match="rank 0 failed in init: ValueError: enough"):
        launch(program, World(3, max_running=3))
    assert rank_threads() == []


def test_zerosims_own_errors_come_as_they_are() -> None:
    def greedy(ctx: Context) -> None:
        if ctx.rank == 1:
            ctx.device.alloc((1000,), fp32, Kind.PARAM)
        ctx.comm.barrier()

    with pytest.raises(OutOfMemory) as caught:
        launch(greedy, World(2, capacity=100))
    assert caught.value.rank == 1

    def wrong(ctx: Context) -> None:
        ctx.comm.all_reduce(make(ctx, [1.0]), op="mean")

    with pytest.raises(InputError, match="rank 0: all_reduce with unknown op 'mean'"):
        launch(wrong, World(2))


def test_a_new_launch_follows_a_failed_one() -> None:
    def fails(ctx: Context) -> None:
        raise SystemExit(3)

    with pytest.raises(RankFailed, match="SystemExit: 3"):
        launch(fails, World(2))
    assert launch(lambda ctx: ctx.rank, World(2)) == [0, 1]


Verb = Callable[[Context], Any]

MISMATCHES: dict[str, tuple[Verb, Verb, str, str]] = {
    "operation": (
        lambda ctx: ctx.comm.all_reduce(make(ctx, np.ones(4))),
        lambda ctx: ctx.comm.reduce_scatter(make(ctx, np.ones(4))),
        "all_reduce avg of fp32 (4,)",
        "reduce_scatter avg of fp32 (4,)",
    ),
    "shape": (
        lambda ctx: ctx.comm.all_gather(make(ctx, np.ones(4))),
        lambda ctx: ctx.comm.all_gather(make(ctx, np.ones(5))),
        "all_gather of fp32 (4,)",
        "all_gather of fp32 (5,)",
    ),
    "dtype": (
        lambda ctx: ctx.comm.all_gather(make(ctx, np.ones(4))),
        lambda ctx: ctx.comm.all_gather(make(ctx, np.ones(4), fp16)),
        "all_gather of fp32 (4,)",
        "all_gather of fp16 (4,)",
    ),
    "op": (
        lambda ctx: ctx.comm.all_reduce(make(ctx, np.ones(4)), op="sum"),
        lambda ctx: ctx.comm.all_reduce(make(ctx, np.ones(4)), op="max"),
        "all_reduce sum of fp32 (4,)",
        "all_reduce max of fp32 (4,)",
    ),
    "root": (
        lambda ctx: ctx.comm.broadcast(make(ctx, np.ones(4)), src=0),
        lambda ctx: ctx.comm.broadcast(make(ctx, np.ones(4)), src=1),
        "broadcast root 0 of fp32 (4,)",
        "broadcast root 1 of fp32 (4,)",
    ),
    "count": (
        lambda ctx: ctx.comm.all_reduce(make(ctx, np.ones(4))),
        lambda ctx: ctx.comm.all_reduce([make(ctx, np.ones(4)), make(ctx, np.ones(2))]),
        "all_reduce avg of fp32 (4,)",
        "all_reduce avg of fp32 (4,) and (2,)",
    ),
    "message": (
        lambda ctx: ctx.comm.send(make(ctx, np.ones((2, 2)), fp16), dst=1),
        lambda ctx: ctx.comm.recv((4,), fp16, src=0),
        "send of fp16 (2, 2)",
        "recv of fp16 (4,)",
    ),
}


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatch_names_both_ranks_and_what_each_called(what: str, algorithm: str) -> None:
    one, other, said_one, said_other = MISMATCHES[what]

    def program(ctx: Context) -> None:
        with ctx.device.phase(Phase.BACKWARD), ctx.device.scope(unit=f"h.{ctx.rank}"):
            (other if ctx.rank == 1 else one)(ctx)

    with pytest.raises(Mismatch) as caught:
        launch(program, World(2, algorithm=algorithm))
    text = str(caught.value)
    assert f"rank 1 called {said_other} in backward of h.1" in text
    assert f"rank 0 called {said_one} in backward of h.0" in text
    assert caught.value.rank == 1
    assert isinstance(caught.value, CommError)


@pytest.mark.parametrize("max_running", [1, 2])
def test_a_rank_that_returns_early_is_a_deadlock(max_running: int) -> None:
    def program(ctx: Context) -> None:
        if ctx.rank != 2:
            with ctx.device.scope(phase=Phase.FORWARD, unit="wte"):
                ctx.comm.all_gather(make(ctx, np.ones(3), fp16))

    with pytest.raises(Deadlock) as caught:
        launch(program, World(4, max_running))
    text = str(caught.value)
    assert "3 ranks wait" in text
    assert "ranks 0-1, 3: waiting in all_gather of fp16 (3,) in forward of wte" in text
    assert "for rank 2" in text
    assert "rank 2: finished" in text


@pytest.mark.parametrize("max_running", [1, 3])
def test_crossed_order_is_a_deadlock(max_running: int) -> None:
    def program(ctx: Context) -> None:
        if ctx.rank == 0:
            ctx.comm.send(make(ctx, np.ones(2)), dst=1)
            ctx.comm.recv((2,), fp32, src=1)
        elif ctx.rank == 1:
            ctx.comm.send(make(ctx, np.ones(2)), dst=0)
            ctx.comm.recv((2,), fp32, src=0)
        ctx.comm.barrier()

    with pytest.raises(Deadlock) as caught:
        launch(program, World(3, max_running))
    text = str(caught.value)
    assert "rank 0: waiting in send of fp32 (2,) in init (number 0 of group 0, 1) for rank 1" in text.replace(
        "0-1", "0, 1"
    )
    assert "rank 1: waiting in send of fp32 (2,) in init (number 0 of group 1, 0) for rank 0" in text
    assert "rank 2: waiting in barrier in init (number 0 of group 0-2) for ranks 0-1" in text


@pytest.mark.quick(1)
@pytest.mark.parametrize("max_running", [1, 2, 4])
def test_a_late_rank_is_named(max_running: int) -> None:
    stop = threading.Event()

    def program(ctx: Context) -> None:
        with ctx.device.scope(phase=Phase.BACKWARD, unit="h.3"):
            if ctx.rank == 1:
                stop.wait(SECONDS)  # stuck in its own code: no kernel, no collective
            ctx.comm.all_reduce(make(ctx, np.ones(2)))

    with pytest.raises(LateRank) as caught:
        launch(program, World(4, max_running, timeout_s=0.3))
    assert "rank 1" in left_until(stop)  # nobody waited for it
    text = str(caught.value)
    assert "did not arrive" in text.splitlines()[0]
    assert "0.3 s" in text
    assert "waiting in all_reduce avg of fp32 (2,) in backward of h.3" in text
    assert "rank 1: running in backward of h.3, after 0 kernels" in text
    assert caught.value.rank == 1


@pytest.mark.slow
def test_a_slow_rank_is_not_late() -> None:
    def program(ctx: Context) -> None:
        buffer = make(ctx, [0.0])
        if ctx.rank == 1:
            for _ in range(12):
                time.sleep(0.05)
                work(ctx, buffer)  # slow, but something happens
        ctx.comm.barrier()

    launch(program, World(2, max_running=2, timeout_s=0.3))
    launch(lambda ctx: time.sleep(0.4), World(2, max_running=2, timeout_s=0.1))  # nobody waits for anybody


def test_a_run_that_was_stopped_has_no_late_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z, or a machine that sleeps: much time passes from one look to the next."""
    looks, works, clock, real = itertools.count(), threading.Event(), itertools.count(step=1000), Scheduler.wait_for_end

    def wait_for_end(scheduler: Scheduler, timeout_s: float) -> bool:
        if next(looks) == 5:
            works.set()
        return real(scheduler, timeout_s)

    def program(ctx: Context) -> None:
        if ctx.rank == 0:
            works.wait(SECONDS)
        ctx.comm.barrier()

    monkeypatch.setattr(Scheduler, "wait_for_end", wait_for_end)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    launch(program, World(2, max_running=2))


@pytest.mark.slow
def test_a_rank_that_keeps_its_turn_is_late_before_anyone_could_arrive() -> None:
    stop = threading.Event()

    def program(ctx: Context) -> None:
        if ctx.rank == 0:
            stop.wait(SECONDS)
        ctx.comm.barrier()

    with pytest.raises(LateRank, match="rank 0 did not arrive") as caught:
        launch(program, World(3, timeout_s=0.2))
    assert "rank 0" in left_until(stop)
    assert caught.value.rank == 0


def test_stands_are_told_in_few_lines() -> None:
    assert rank_status.table(["a", "b", "a", "a", "b"]) == "  ranks 0, 2-3: a\n  ranks 1, 4: b"
    many = rank_status.table([f"at {i}" for i in range(100)]).splitlines()
    assert len(many) == rank_status.MAX_LINES + 1
    assert many[-1] == "  and 68 more"


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Quits(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("max_running", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("error", [Unsayable(), KeyError(Unsayable()), Quits()], ids=lambda error: type(error).__name__)
def test_an_exception_that_cannot_be_shown_ends_the_run_like_any_other(
    error: Exception, ranks: int, max_running: int
) -> None:
    def program(ctx: Context) -> None:
        if ctx.rank == ranks - 1:
            raise error
        ctx.comm.barrier()

    with pytest.raises(RankFailed) as caught:
        launch(program, World(ranks, max_running))
    assert caught.value.rank == ranks - 1
    assert caught.value.__cause__ is error
    said = str(caught.value)
    assert said.startswith(f"rank {ranks - 1} failed in init: {type(error).__name__}: (it cannot be shown")
    assert rank_threads() == []


# -- interrupts ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_interrupt_ends_all_ranks() -> None:
    def program(ctx: Context) -> None:
        buffer = make(ctx, [0.0])
        if ctx.rank == 0:
            _thread.interrupt_main()
            while True:
                work(ctx, buffer)
        ctx.comm.barrier()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here, as under nohup
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(program, World(4, max_running=2))
    finally:
        signal.signal(signal.SIGINT, before)
    assert rank_threads() == []


@posix
def test_interrupted_process_ends() -> None:
    program = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # where pytest was started with it ignored
from zerosim.comm.runtime import World, launch

def program(ctx):
    if ctx.rank == 2:
        print("ready", flush=True)
        time.sleep(10000)  # hears nothing
    ctx.comm.barrier()

launch(program, World(4, max_running=4))
"""
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with ended(started([sys.executable, "-c", program], **pipes)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=2 * SECONDS)
    assert errors.strip().endswith("KeyboardInterrupt")
    assert process.returncode not in (0, -signal.SIGKILL)
