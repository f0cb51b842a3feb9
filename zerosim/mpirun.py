"""What the environment says about who started this process. Imports nothing: it is asked at every start.

Source: the variables that Open MPI's, MPICH's, MVAPICH's and Slurm's launchers set in every process they start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
LAUNCHED = (*SIZES, "PMI_RANK", "PMIX_RANK")  # SLURM_PROCID alone is set in a batch script too, that nobody launched


def mpirun_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many processes a launcher started, this one among them; None where none did, or where it does not say."""
    return _number(SIZES, environment)


def mpirun_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Which of them this process is; None where no launcher started it."""
    return _number(RANKS, environment) if is_launched(environment) else None


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    return any(name in environment for name in LAUNCHED)


def _number(names: tuple[str, ...], environment: Mapping[str, str]) -> int | None:
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), None)
