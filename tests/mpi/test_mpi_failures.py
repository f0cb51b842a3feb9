"""One process failing ends the job: one message, the right exit code, nobody left behind."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import time
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from processes import SECONDS, ended

from zerosim.device.nvme import in_run_folder

from .mpirun import PROGRAMS, needs_mpi, run, start

pytestmark = needs_mpi

SCREEN = 24


def fail(how: str, folder: Path, processes: int = 3, per_process: int = 1, **world: Any) -> CompletedProcess[str]:
    asked = folder / "settings"
    settings: dict[str, Any] = {"own": {"how": how}, "world": {"capacity": 10**8, "timeout_s": 2.0, **world}}
    if how == "stops":
        settings["answer_s"] = 3.0
    asked.write_bytes(pickle.dumps(settings))
    return run(processes, str(PROGRAMS), "failing", str(per_process), str(asked), str(folder / "left"))


@pytest.mark.parametrize("per_process", [1, 2])
@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        (
            "mismatch",
            4,
            r"Mismatch: rank {last} called all_reduce avg of fp32 \(8,\) in \w+ but rank \d called all_reduce",
        ),
        (
            "roots",
            4,
            r"Mismatch: rank \d called broadcast root \d of fp32 \(1000,\) in init but rank \d called broadcast",
        ),
        ("exception", 4, r"RankFailed: rank {last} failed in init: ValueError: the program's own mistake"),
        ("memory", 3, r"OutOfMemory: rank {last} is out of memory"),
        ("returns", 4, r"Deadlock: deadlock: \d ranks? waits? in a collective and no rank is left"),
        ("circle", 4, r"Deadlock: deadlock: \d ranks wait in a collective and no rank is left"),
        ("sleeps", 4, r"LateRank: rank {last} did not arrive while others wait"),
    ],
)
def test_a_failure_is_told_once_with_its_exit_code(
    how: str, code: int, message: str, per_process: int, tmp_path: Path
) -> None:
    job = fail(how, tmp_path, per_process=per_process)
    told = [line for line in job.stderr.splitlines() if re.match(r"\w+: ", line)]
    last = str(3 * per_process - 1)
    assert re.match(message.replace("{last}", last), told[0]), job.stderr
    assert len(told) == 1, job.stderr
    assert "Traceback" not in job.stderr
    assert job.returncode == code
    assert len((job.stdout + job.stderr).splitlines()) <= SCREEN


@pytest.mark.parametrize("algorithm", ["direct", "ring", "native"])
def test_split_sizes_that_do_not_fit_are_a_mismatch(algorithm: str, tmp_path: Path) -> None:
    job = fail("sizes", tmp_path, algorithm=algorithm)
    assert "Mismatch: all_to_all: member 0 of the group sends 2 elements to member 2, which expects 3" in job.stderr
    assert job.returncode == 4


def test_a_verb_that_mpi_does_not_have_is_refused(tmp_path: Path) -> None:
    job = fail("unknown", tmp_path)
    assert "InputError: collective native: MPI has no 'scan': choose direct or ring" in job.stderr
    assert job.returncode == 2


def test_a_circle_of_waiting_ranks_is_found_before_patience_ends(tmp_path: Path) -> None:
    job = fail("circle", tmp_path, timeout_s=1000.0)
    for rank in range(3):
        assert f"rank {rank}: waiting in recv of fp32 (4,) in init" in job.stderr
    assert job.returncode == 4


def test_a_long_wait_is_no_failure_while_a_rank_works(tmp_path: Path) -> None:
    """Process 0 has nothing to do for longer than its patience; what it waits for does something all along."""
    program = tmp_path / "slow.py"
    program.write_text(
        "import time\n"
        "from zerosim.device.work import KernelWork\n"
        "from zerosim.comm.runtime import World, launch\n"
        "def program(ctx):\n"
        "    for _ in range(12 * ctx.rank):\n"
        "        time.sleep(0.1)\n"
        "        ctx.device.count(KernelWork('kernel', 'vector', 1, 1, 0))\n"
        "    ctx.comm.barrier()\n"
        "launch(program, World(ranks=2, transport='mpi', timeout_s=0.6))\n",
        "utf-8",
    )
    job = run(2, str(program))
    assert job.returncode == 0, job.stderr


@pytest.mark.parametrize("how", ["dies", "stops"])
def test_a_process_that_is_gone_ends_the_job(how: str, tmp_path: Path) -> None:
    began = time.monotonic()
    job = fail(how, tmp_path)
    assert job.returncode not in (0, None)
    assert time.monotonic() - began < 25
    assert "Traceback" not in job.stderr
    assert len((job.stdout + job.stderr).splitlines()) <= SCREEN
    if how == "stops":
        assert "LateRank: rank 2 did not arrive" in job.stderr
        assert "its process does not answer" in job.stderr


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_mpirun(sign: signal.Signals, tmp_path: Path) -> None:
    asked = tmp_path / "settings"
    asked.write_bytes(pickle.dumps({"own": {"how": "forever"}}))
    with ended(start(2, str(PROGRAMS), "failing", "1", str(asked), str(tmp_path / "left"))) as job:
        assert job.stdout is not None
        found = [int(job.stdout.readline().split()[1]) for _ in range(2)]
        job.send_signal(sign)
        job.communicate(timeout=SECONDS)
    deadline = time.monotonic() + SECONDS
    while any(_is_alive(pid) for pid in found) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in found if _is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text("utf-8").rsplit(")", 1)[1].split()[0]
    except ProcessLookupError:
        return False
    except OSError:  # there is no /proc, or it has ended this moment
        return not Path("/proc").exists()
    return state != "Z"


def test_objects_go_round_and_a_failure_between_launches_is_everybodys(tmp_path: Path) -> None:
    program = tmp_path / "objects.py"
    program.write_text(
        "import sys\n"
        "from zerosim.comm.transports.mpi.session import mpi_session\n"
        "from zerosim.errors import InputError, ZerosimError\n"
        "session = mpi_session()\n"
        "me = session.process\n"
        "large = bytes([me]) * (3 << 20)\n"
        "try:\n"  # a failure reaches the others wherever they are, in the first exchange too
        "    assert session.exchange(large) == [bytes([p]) * (3 << 20) for p in range(3)]\n"
        "    if me == 1:\n"
        "        raise session.fail(InputError('a file that only one process cannot read'))\n"
        "    session.exchange(me)\n"
        "except ZerosimError as error:\n"
        "    assert error is session.agreed\n"
        "    print(me, type(error).__name__, error, flush=True)\n"
        "    sys.exit(error.exit_code)\n",
        "utf-8",
    )
    job = run(3, str(program))
    said = "InputError a file that only one process cannot read (in process 1, of 3)"
    assert sorted(job.stdout.splitlines()) == [f"{me} {said}" for me in range(3)], job.stderr
    assert job.returncode == 2


LONG = "-m zerosim run --world mpi --ranks 3 --steps 1000000 -q --stage 3 --offload optimizer=nvme,params=nvme"
SMALL = "--layers 2 --hidden 16 --heads 2"


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_mpirun_leaves_no_files_of_nvme(sign: signal.Signals, tmp_path: Path) -> None:
    """If mpirun is killed, its processes remove them. Else it kills processes that take half a second to end: what they
    leave on a busy machine, the next start removes."""
    with ended(start(3, *LONG.split(), *SMALL.split(), "--nvme", str(tmp_path))) as job:
        while len({path.parent for path in tmp_path.glob("*/*.bin")}) < 3:
            assert job.poll() is None
            time.sleep(0.05)
        job.send_signal(sign)
        job.communicate(timeout=SECONDS)
    while _with_word(str(tmp_path)):
        time.sleep(0.05)
    if sign != signal.SIGKILL:
        in_run_folder(str(tmp_path), lambda folder: folder, writes=False)
    assert list(tmp_path.iterdir()) == []


def _with_word(word: str) -> list[str]:
    """The processes with this word among those that started them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if word in path.read_bytes().decode(errors="replace").split("\0"):
                found.append(path.parent.name)
    return found
