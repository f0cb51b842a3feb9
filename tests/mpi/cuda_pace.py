"""cuda_pace.py threads|graphs|mpi [MODEL]: the seconds of a step of four ranks at ZeRO-3 on the GPUs that are visible.

    python tests/mpi/cuda_pace.py threads 45M
    mpirun -n 4 python tests/mpi/cuda_pace.py mpi 45M

Ranks are threads of one process, which share Python's lock, with CUDA graphs or without; or a process each, whose
messages pass through the host's memory unless MPI reads the GPU's. A run of more steps less one of fewer leaves out the
start. The bytes of the staging copies are the record's, of rank 0.
"""

from __future__ import annotations

import sys
import time

import zerosim
from zerosim.bench.suite import SUITES
from zerosim.bench.training import over_ranks
from zerosim.comm.transports.mpi.session import mpi_session
from zerosim.config import RunConfig
from zerosim.train.result import RunResult

FEW, MORE = 3, 9


def timed(config: RunConfig) -> tuple[float, RunResult]:
    """Run it, and return the seconds that this took."""
    began = time.monotonic()
    result = zerosim.run(config)
    return time.monotonic() - began, result


def main(way: str, model: str = "45M") -> None:
    world = "mpi" if way == "mpi" else "threads"
    config = over_ranks(SUITES["cuda"].models[model])
    config = config.replace(world=world, precision="bf16", capture_graphs=way == "graphs")
    few_s, _ = timed(config.replace(steps=FEW))
    more_s, result = timed(config.replace(steps=MORE))
    if way != "mpi" or mpi_session().process == 0:
        copied = sum(row.payload_bytes for row in result.traffic[0] if row.purpose == "staging")
        step_ms = 1e3 * (more_s - few_s) / (MORE - FEW)
        print(f"{model}, 4 ranks at ZeRO-3, {way}: {step_ms:.1f} ms a step, {copied:,} bytes staged", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
