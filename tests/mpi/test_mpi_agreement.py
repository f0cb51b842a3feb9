"""Processes agree: on one error, how to go on after it, what they were asked for, and calls that nobody answered."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from .mpirun import needs_mpi, run

pytestmark = needs_mpi

HEAD = """
import sys, time
import zerosim
from zerosim.comm.transports.mpi.session import mpi_session
from zerosim.device.device import Kind
from zerosim.dtypes import fp32
from zerosim.errors import InputError, OutOfMemory, ZerosimError
from zerosim.comm.runtime import World, launch
session = mpi_session()
me = session.process
"""


def said(processes: int, body: str, folder: Path) -> list[str]:
    """What the processes print, sorted."""
    script = folder / "script.py"
    script.write_text(HEAD + body, "utf-8")
    job = run(processes, str(script))
    assert job.returncode == 0, job.stdout + job.stderr
    return sorted(job.stdout.splitlines())


def test_after_a_failure_outside_of_a_launch_all_go_on(tmp_path: Path) -> None:
    """What was on its way when it happened is not taken for what comes next."""
    body = """
try:
    if me == 1:
        raise session.fail(InputError("no"))
    session.exchange("first" * 1000)
except ZerosimError as error:
    print(me, error, flush=True)
print(me, session.exchange(("second", me)) == [("second", p) for p in range(3)], flush=True)
print(me, launch(lambda ctx: ctx.comm.rank, World(ranks=3, transport="mpi")), flush=True)
"""
    told = ("True", "[{me}]", "no (in process 1, of 3)")
    assert said(3, body, tmp_path) == sorted(f"{me} {line.format(me=me)}" for me in range(3) for line in told)


def test_a_process_that_is_ahead_fails(tmp_path: Path) -> None:
    began = time.monotonic()
    body = """
try:
    if me == 2:
        time.sleep(1.0)
    session.exchange(me)
    if me == 1:
        raise session.fail(InputError("ahead"))
    session.exchange(1)
except ZerosimError as error:
    print(me, error, flush=True)
"""
    assert said(3, body, tmp_path) == [f"{me} ahead (in process 1, of 3)" for me in range(3)]
    assert time.monotonic() - began < 15  # nobody waited for an answer that could not come


def test_of_two_failures_all_tell_the_lowest_with_what_it_knows(tmp_path: Path) -> None:
    body = """
def program(ctx):
    if ctx.rank == 2:
        raise InputError("the third")
    if ctx.rank == 1:
        ctx.device.alloc((10**6,), fp32, Kind.GRAD)
    ctx.comm.barrier()
for _ in range(2):
    try:
        launch(program, World(ranks=3, transport="mpi", capacity=1000))
    except OutOfMemory as error:
        print(me, error.rank, error.requested, error.kind, error.capacity, error.exit_code, flush=True)
    except InputError as error:
        print(me, "third", flush=True)
"""
    lines = said(3, body, tmp_path)
    told = [{line.split(maxsplit=1)[1] for line in lines if line.startswith(str(me))} for me in range(3)]
    assert told[0] == told[1] == told[2]
    assert told[0] <= {"1 4000000 grad 1000 3", "third"}


def test_an_exception_that_cannot_be_shown_ends_all_like_any_other(tmp_path: Path) -> None:
    body = """
class Unsayable(Exception):
    def __str__(self):
        raise RuntimeError("no words")
    __repr__ = __str__
def program(ctx):
    if ctx.rank == 1:
        raise Unsayable
    ctx.comm.barrier()
for _ in range(2):
    try:
        launch(program, World(ranks=2, transport="mpi"))
    except ZerosimError as error:
        print(me, type(error).__name__, error, flush=True)
try:
    if me == 1:
        raise session.fail(Unsayable())
    session.exchange(me)
except Exception as error:
    print(me, type(error).__name__, flush=True)
"""
    failed = "RankFailed rank 1 failed in init: Unsayable: (it cannot be shown: its message raised RuntimeError)"
    lines = said(2, body, tmp_path)
    assert [line for line in lines if "init" in line] == [f"{me} {failed}" for me in (0, 0, 1, 1)]
    assert len(lines) == 6


@pytest.mark.parametrize("verb", ["broadcast(b, 0)", "send(b, 1)", "reduce(b, 1)"])
@pytest.mark.parametrize("numel", [8, 100_000])
def test_a_call_that_nobody_answers_is_an_error_whatever_its_size(verb: str, numel: int, tmp_path: Path) -> None:
    body = f"""
def program(ctx):
    b = ctx.device.alloc(({numel},), fp32, Kind.GRAD)
    ctx.device.backend.fill(b.array, 0.0)
    if ctx.rank == 0:
        ctx.comm.{verb}
try:
    launch(program, World(ranks=2, transport="mpi"))
except ZerosimError as error:
    print(me, type(error).__name__, flush=True)
print(me, launch(lambda ctx: ctx.comm.rank, World(ranks=2, transport="mpi")), flush=True)
"""
    assert said(2, body, tmp_path) == ["0 Deadlock", "0 [0]", "1 Deadlock", "1 [1]"]


def test_processes_that_were_asked_for_different_runs_are_told(tmp_path: Path) -> None:
    small = "layers=1, hidden=16, heads=2, seq=8, micro_batch=1, steps=1, world='mpi'"
    body = f"""
for more in (dict(lr=1e-3 * (1 + me)), dict(data=str(me))):
    if "data" in more:
        from pathlib import Path
        folder = Path(sys.argv[0]).parent / str(me)
        folder.mkdir()
        (folder / "text").write_bytes(bytes([me]) * 100)
        import os
        os.chdir(folder)
        more = dict(data="text")
    try:
        zerosim.run(zerosim.RunConfig({small}, **more))
    except InputError as error:
        print(me, error, flush=True)
"""
    lines = said(2, body, tmp_path)
    for me in range(2):
        own = [line for line in lines if line.startswith(str(me))]
        assert len(own) == 2
        assert "data text: process 0 and process 1 read different files under this name" in own[0]
        assert "lr is 0.001 in process 0 and 0.002 in process 1" in own[1]


def test_many_small_buckets_are_quick(tmp_path: Path) -> None:
    """All rounds of a call are joined at once; only the first of a group is looked at."""
    began = time.monotonic()
    body = """
def program(ctx):
    b = ctx.device.alloc((6000,), fp32, Kind.GRAD)
    ctx.device.backend.fill(b.array, 1.0)
    ctx.comm.all_reduce(b)
    return float(b.array.sum())
print(me, launch(program, World(ranks=2, transport="mpi", bucket_bytes=8)), flush=True)
"""
    assert said(2, body, tmp_path) == ["0 [6000.0]", "1 [6000.0]"]
    assert time.monotonic() - began < 40  # it was quadratic once: minutes


def test_a_rings_bytes_beside_native_calls_are_a_rings(tmp_path: Path) -> None:
    body = """
import json
fields = dict(layers=1, hidden=10, heads=2, seq=5, micro_batch=1, steps=1, precision="fp32", world="mpi")
for stage in (0, 1, 2, 3):
    rows = {}
    for rule in ("native", "ring"):
        config = zerosim.RunConfig(**fields, stage=stage, collective=rule, bucket_bytes=None)
        result = zerosim.run(config)
        traffic = [row for rank in result.traffic for row in rank]
        rows[rule] = [row.modelled_bytes if rule == "native" else row.sent_bytes for row in traffic]
    if me == 0:
        print(json.dumps(rows), flush=True)
"""
    for line in said(3, body, tmp_path):
        rows = json.loads(line)
        assert rows["native"] == rows["ring"]
        assert sum(rows["ring"]) > 0
