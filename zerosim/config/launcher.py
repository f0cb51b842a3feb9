"""What the environment says about this process's launcher. Imports nothing heavy: it is needed at every start.

A launcher's variables are inherited: a shell that it started passes them on to commands typed there, so they alone do
not mean that the launcher started this process. Only `--world mpi` makes processes one world.

Source: the variables that Open MPI's, MPICH's, MVAPICH's and Slurm's launchers set in every process they start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_RANK")

STDIN = 0


def mpirun_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many processes a launcher started, this one among them; None if none did, or if it does not say."""
    return _number(SIZES, environment)


def size_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of the variable that `mpirun_size` read."""
    return next((name for name in SIZES if environment.get(name, "").isdigit()), None)


def mpirun_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return this process's number among them; None if no launcher started it."""
    return _number(RANKS, environment) if is_launched(environment) else None


def mpirun_folder(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the folder of this job's files on this host, which the launcher removes at the end of the job; None if it
    names none."""
    folder = environment.get("PMIX_SERVER_TMPDIR")
    return folder if folder and os.path.isdir(folder) else None


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher started this very process, not a shell above it: a launched process has no keyboard."""
    if os.isatty(STDIN):
        return False
    return any(name in environment for name in LAUNCHED) or _is_task(environment)


def _is_task(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process. A batch script is no step; a task's children inherit its number."""
    return "SLURM_STEP_NUM_TASKS" in environment and environment.get("SLURM_TASK_PID") == str(os.getpid())


def _number(names: tuple[str, ...], environment: Mapping[str, str]) -> int | None:
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), None)
