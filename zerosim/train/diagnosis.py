"""Diagnose this machine for zerosim: versions, backends, GPUs, MPI, BLAS, cores and memory.

The remedies come from the same checks that a run makes (`backends/cuda/check.py`,
`comm/transports/mpi/check.py`). Nothing raises, and nothing hangs: CuPy and MPI are queried in separate processes,
side by side and with a time limit, because a driver may hang, MPI may print, and either may kill its process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zerosim.backends.cuda.check import cuda_faults, nccl_fault
from zerosim.backends.cuda.facts import CudaFacts, Gpu, installed_facts
from zerosim.comm.runtime import make_backend
from zerosim.comm.transports.mpi.check import MpiFacts, mpi_facts, mpi_fault
from zerosim.errors import message_of
from zerosim.train import processes
from zerosim.version import __version__

LIMIT_S = 8.0
"""The time limit for CuPy and MPI to answer."""

LIBRARIES = {"numpy": "numpy", "ml_dtypes": "ml_dtypes", "matplotlib": "matplotlib", "torch": "torch"}
"""The listed packages with their names in pip. Only `bench` and the tests against PyTorch need torch."""

LAUNCHER = ("PMI", "PRTE", "OMPI_COMM_WORLD", "OMPI_MCA_ess", "OMPI_MCA_orte", "HYD", "SLURM_", "MPI_LOCAL")
"""Prefixes of the variables that tell a process its launcher: the diagnosing process must start MPI alone."""


@dataclass(frozen=True, slots=True)
class Library:
    """A Python package; `version` is None if it is not installed, and `mend` is the command that installs it."""

    name: str
    version: str | None
    mend: str | None


@dataclass(frozen=True, slots=True)
class Blas:
    """A linear algebra library that NumPy has loaded, and its default number of threads."""

    name: str
    version: str | None
    threads: int


@dataclass(frozen=True, slots=True)
class Machine:
    """`cores` are those that this process may use; memory in bytes, the container's if it has a limit."""

    system: str
    processor: str
    cores: int
    memory_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class Fault:
    """A problem, and the command or setting that mends it."""

    what: str
    mend: str


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend or a world can be used; if not, all problems with the commands that mend them."""

    name: str
    is_usable: bool
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that `zerosim doctor` shows."""

    zerosim: str
    python: str
    executable: str
    standings: tuple[Availability, ...]  # the name that its JSON has
    libraries: tuple[Library, ...]
    blas: tuple[Blas, ...]
    machine: Machine
    cuda: CudaFacts
    mpi: MpiFacts

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, schema 1."""
        return {"schema": 1, **asdict(self)}


def diagnose() -> Diagnosis:
    """Diagnose everything in less than ten seconds, without raising for anything missing or broken."""
    cuda_installed, mpi_installed = installed_facts(), mpi_facts(start=False)
    until = time.monotonic() + LIMIT_S
    cuda_asked = _ask("zerosim.backends.cuda.facts") if cuda_installed.is_installed else None
    mpi_asked = _ask("zerosim.comm.transports.mpi.check") if mpi_installed.mpi4py is not None else None
    try:
        backends = [_backend("numpy"), _backend("meta")]
        blas = _blas()
        cuda = cuda_installed if cuda_asked is None else _cuda_facts(_answer(cuda_asked, until), cuda_installed)
        mpi = mpi_installed if mpi_asked is None else _mpi_facts(_answer(mpi_asked, until), mpi_installed)
    finally:
        for process in (cuda_asked, mpi_asked):
            if process is not None:
                processes.end(process)
    faults = cuda_faults(cuda)
    nccl = [] if faults else [_availability("nccl", nccl_fault(cuda))]  # without CUDA there is nothing to report
    return Diagnosis(
        zerosim=__version__,
        python=platform.python_version(),
        executable=sys.executable,
        standings=(*backends, _availability("cuda", *faults), *nccl, _availability("mpi", mpi_fault(mpi))),
        libraries=tuple(_library(name, package) for name, package in LIBRARIES.items()),
        blas=blas,
        machine=_machine(),
        cuda=cuda,
        mpi=mpi,
    )


def _availability(name: str, *faults: tuple[str, str] | None) -> Availability:
    found = tuple(Fault(*fault) for fault in faults if fault is not None)
    return Availability(name, not found, found)


def _backend(name: str) -> Availability:
    """Return the availability of a backend that needs only zerosim's own packages."""
    try:
        make_backend(name)
    except Exception as error:  # a broken NumPy fails in many ways
        why = (message_of(error).strip().splitlines() or [type(error).__name__])[0]
        return _availability(name, (why, "pip install --force-reinstall numpy ml_dtypes"))
    return _availability(name)


def _library(name: str, package: str) -> Library:
    try:
        return Library(name, importlib.metadata.version(package), None)
    except importlib.metadata.PackageNotFoundError:
        return Library(name, None, f"pip install {package}")


def _blas() -> tuple[Blas, ...]:
    """Return the libraries that the import of the NumPy backend has loaded."""
    try:
        from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

        pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
        return tuple(Blas(pool["internal_api"], pool["version"], int(pool["num_threads"])) for pool in pools)
    except Exception:  # threadpoolctl leaves out unknown libraries
        return ()


def _machine() -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    system = f"{platform.system()} {platform.release()}"
    memory, free = _memory()
    return Machine(system, platform.machine(), cores, memory, free)


def _memory() -> tuple[int | None, int | None]:
    """Return total and free bytes, the container's if its limit is lower (cgroup v2); None if unknown."""
    total = free = None
    with contextlib.suppress(AttributeError, ValueError, OSError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(ValueError, OSError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text("utf-8").splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None
    with contextlib.suppress(ValueError, OSError):  # 'max' means no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text("utf-8"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text("utf-8"))
        total = limit if total is None else min(total, limit)
        free = limit - used if free is None else min(free, limit - used)
    return total, free


def _ask(module: str) -> subprocess.Popen[str] | None:
    """Start a process that prints the facts of `module`; None if none can be started."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    code = f"from {module} import main; main()"
    try:
        return processes.start([sys.executable, "-P", "-c", code], {**kept, "PYTHONPATH": path}, subprocess.PIPE)
    except OSError:
        return None


def _answer(process: subprocess.Popen[str], until: float) -> dict[str, Any] | str:
    """Return the process's last printed line, or one line that explains its absence. MPI and drivers may print other
    lines."""
    try:
        out, err = process.communicate(timeout=max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"no answer within {LIMIT_S:g} s"
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                return dict(json.loads(line))
    printed = [line.strip() for line in err.splitlines() if line.strip(" -=*")]
    if process.returncode < 0:
        return f"the process that asked was ended by {signal.Signals(-process.returncode).name}"
    return printed[-1] if printed else f"the process that asked ended with {process.returncode}"


def _cuda_facts(answer: dict[str, Any] | str, installed: CudaFacts) -> CudaFacts:
    if isinstance(answer, str):
        return replace(installed, look_error=answer)
    gpus = tuple(Gpu(**gpu) for gpu in answer.pop("gpus"))
    return CudaFacts(**{**answer, "distributions": tuple(answer["distributions"]), "gpus": gpus})


def _mpi_facts(answer: dict[str, Any] | str, installed: MpiFacts) -> MpiFacts:
    return replace(installed, look_error=answer) if isinstance(answer, str) else MpiFacts(**answer)
