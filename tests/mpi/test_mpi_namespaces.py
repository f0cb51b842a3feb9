"""A run over several hosts: what it leaves on threads, over the network alone, and nothing left when it fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zerosim
from zerosim.config import RunConfig
from zerosim.device.events import Message
from zerosim.train.result import RunResult

from . import namespaces
from .mpirun import ENVIRONMENT, ROOT, needs_mpi
from .namespaces import Cluster, cluster, mpirun, processes_on, received_bytes

pytestmark = needs_mpi

OVERHEAD = 1.1
"""Most that the network may carry per byte of payload: frames, TCP, the notes before each message."""
START = 300_000
"""Bytes that starting and ending a job of a few processes may take."""


@pytest.fixture(autouse=True)
def _hosts_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    why = namespaces.refusal()
    if why is not None:
        pytest.skip(why)
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    monkeypatch.chdir(ROOT)


@contextmanager
def started(there: Cluster, processes: int, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`mpirun -n processes zerosim run --world mpi words...` over the hosts; ended at the end, if it has not yet."""
    command, environment = mpirun(there, processes, sys.executable, "-m", "zerosim", "run", "--world", "mpi", *words)
    pipes: dict[str, Any] = dict(
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )
    with subprocess.Popen(command, env=environment, **pipes) as job:
        try:
            yield job
        finally:
            job.kill()


def crossing_bytes(result: RunResult, hosts: int) -> list[int]:
    """Payload that the ranks of each host sent to ranks of others, out of every message in their ledgers."""
    ranks, per_host = len(result.events), len(result.events) // hosts
    sent = [0] * hosts
    for rank, events in enumerate(result.events):
        for event in events:
            if not isinstance(event, Message):
                continue
            assert (event.peer, event.count) == (-1, ranks - 1)  # direct: one to every other rank
            sent[rank // per_host] += event.nbytes * (ranks - per_host)
    return sent


@pytest.mark.parametrize(("processes", "per_process", "hosts"), [(4, 1, 2), (2, 2, 2), (3, 1, 3)])
def test_a_run_over_hosts_leaves_what_threads_leave(
    processes: int, per_process: int, hosts: int, tmp_path: Path
) -> None:
    figures, weights = tmp_path / "run.json", tmp_path / "weights.npz"
    with cluster(hosts, processes) as there:
        before = received_bytes(there)
        words = ["--stage", "3", "--layers", "2", "--hidden", "192", "--heads", "4", "--steps", "2", "-q"]
        words += ["--ranks-per-process", str(per_process)]
        words += ["--json", str(figures), "--save-weights", str(weights)]
        with started(there, processes, *words) as job:
            out, _ = job.communicate(timeout=60)
        said = [line for line in out.splitlines() if "plm:ssh: Warning: setpgid" not in line]  # a race of Open MPI 5's
        assert (job.returncode, said) == (0, [])
        sent = [after - b for b, after in zip(before, received_bytes(there), strict=True)]
        assert [processes_on(host) for host in there.hosts] == [[]] * hosts

    config = RunConfig(stage=3, layers=2, hidden=192, heads=4, steps=2, ranks=processes * per_process)
    here = zerosim.run(config, keep_events=True)
    found, expected = json.loads(figures.read_text("utf-8")), json.loads(json.dumps(here.to_dict()))
    assert (found["config"].pop("world"), expected["config"].pop("world")) == ("mpi", "threads")
    assert (found["config"].pop("ranks_per_process"), expected["config"].pop("ranks_per_process")) == (per_process, 1)
    assert found == expected
    with np.load(weights) as file:
        assert set(file) == set(here.weights)
        for name, array in here.weights.items():
            assert file[name].tobytes() == array.tobytes(), name

    # When all is done every process gets every rank's slice of the fp32 masters, which is no training traffic.
    others = processes - processes // hosts
    masters = 4 * here.num_parameters // hosts * others
    for payload, counted in zip(crossing_bytes(here, hosts), sent, strict=True):
        assert payload > 5_000_000
        assert payload + masters <= counted <= OVERHEAD * (payload + masters) + START


def test_hosts_are_joined_by_the_network_alone() -> None:
    with cluster(2, 2) as there:
        link = ["nsenter", "--target", str(there.switch), "--net", "ip", "link", "set", "port1", "down"]
        subprocess.run(link, check=True, timeout=120)
        with started(there, 2, "--steps", "1", "-q") as job:
            job.communicate(timeout=30)
        assert job.returncode != 0


def wait_until(happens: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if happens():
            return True
        time.sleep(0.05)
    return happens()


def networks(pids: list[int]) -> set[int]:
    found = set()
    for pid in pids:
        with suppress(OSError):  # it has ended meanwhile
            found.add(os.stat(f"/proc/{pid}/ns/net").st_ino)
    return found


def processes_in(inodes: set[int]) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "ns/net").stat().st_ino in inodes:
                found.append(entry.name)
        except OSError:
            continue
    return found


def ranks_of(pids: list[int]) -> list[int]:
    """Those that are Python running zerosim, not a daemon that was told to start it."""
    found = []
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text("utf-8").split("\0")
        except OSError:
            continue
        if words[:3] == [sys.executable, "-m", "zerosim"]:
            found.append(pid)
    return found


def test_a_rank_killed_on_another_host_ends_the_job_everywhere() -> None:
    with cluster(2, 4) as there:
        inodes = networks([there.switch, *(host.pid for host in there.hosts)])
        with started(there, 4, "--stage", "3", "--steps", "10000", "-q") as job:
            assert wait_until(lambda: received_bytes(there)[1] > 2_000_000, 30)  # they train
            last = ranks_of(processes_on(there.hosts[1]))
            assert len(last) == 2
            os.kill(last[-1], signal.SIGKILL)
            out, _ = job.communicate(timeout=20)
        assert job.returncode not in (0, None)
        assert re.search(r"on signal 9|EXIT CODE: 9|Socket closed", out), out  # by the daemon there or by a peer
        assert "Traceback" not in out
        assert len(out.splitlines()) <= 40
        assert wait_until(lambda: not any(processes_on(host) for host in there.hosts), 10)
    assert processes_in(inodes) == []
    assert not there.folder.exists()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_hosts_whose_program_is_killed(sign: signal.Signals, tmp_path: Path) -> None:
    words = ["-n", "2", "--hosts", "2", "--", "run", "--world", "mpi", "--steps", "10000", "-q"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed program's files
    pipes: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    job = subprocess.Popen([sys.executable, namespaces.__file__, *words], env=environment, **pipes)
    inodes: set[int] = set()

    def ranks_run() -> bool:
        children = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text("utf-8").split()]
        inodes.update(networks(children))
        inodes.difference_update(networks([os.getpid()]))
        return len(ranks_of([int(pid) for pid in processes_in(inodes)])) == 2

    try:
        assert wait_until(ranks_run, 30)
        time.sleep(2)  # they train
        job.send_signal(sign)
        job.wait(timeout=20)
        assert wait_until(lambda: processes_in(inodes) == [], 10)
    finally:
        job.kill()
        job.wait(timeout=20)
