"""cuda_pace.py WAY [MODEL]: the seconds of a step on the GPUs that are visible, start left out.

    one, one-graphs     one rank, without CUDA graphs and with them
    four, four-graphs   four ranks at ZeRO-3 on the same batch, threads of one process, which share Python's lock
    four-processes      a process each, under mpirun -n 4; messages pass through the host's memory unless MPI reads the
                        GPU's, and the bytes of these copies are the record's, of rank 0

A run compiles the kernels; a run of more steps less one of fewer leaves out what comes before and after them.
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

FEW, MORE = 4, 12  # graphs replay from the third step or fourth on


def timed(config: RunConfig) -> tuple[float, RunResult]:
    """Run it, and return the seconds that this took."""
    began = time.monotonic()
    result = zerosim.run(config)
    return time.monotonic() - began, result


def main(way: str, model: str = "45M") -> None:
    ranks, _, how = way.partition("-")
    world, whole = "mpi" if how == "processes" else "threads", SUITES["cuda"].models[model]
    config = over_ranks(whole) if ranks == "four" else whole
    config = config.replace(world=world, precision="bf16", capture_graphs=how == "graphs")
    _, (few_s, _), (more_s, result) = (timed(config.replace(steps=steps)) for steps in (FEW, FEW, MORE))
    if world == "threads" or mpi_session().process == 0:
        copied = sum(row.payload_bytes for row in result.traffic[0] if row.purpose == "staging")
        step_ms = 1e3 * (more_s - few_s) / (MORE - FEW)
        print(f"{model}, {way}: {step_ms:.1f} ms a step, {copied:,} bytes staged", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
