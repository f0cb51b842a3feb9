"""Whole training runs over MPI, each compared by process 0 with the same run on threads.

    mpirun -n 2 python runs.py RANKS_PER_PROCESS RUNS RESULTS

RUNS is a JSON list of RunConfig fields; RESULTS gets what differed, run by run ([] where nothing did).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import zerosim
from zerosim.comm.transports.mpi.session import mpi_session
from zerosim.config import RunConfig
from zerosim.train.result import RunResult


def whole_result(result: RunResult) -> dict[str, Any]:
    """Everything that a run leaves but its configuration, comparable with ==."""
    values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    del values["config"]
    values["layout"] = vars(result.layout)
    values["steps"] = repr(result.steps)  # a skipped step's norm may be nan, which is not even itself
    values["weights"] = {name: (array.dtype.str, array.tobytes()) for name, array in result.weights.items()}
    return values


def differences(there: RunResult, here: RunResult) -> list[str]:
    a, b = whole_result(there), whole_result(here)
    return [name for name in a if a[name] != b[name]]


def distance(there: RunResult, here: RunResult) -> float:
    """The largest difference of two losses, relative."""
    a, b = np.array(there.losses), np.array(here.losses)
    return float(np.max(np.abs(a - b) / np.abs(b)))


def main() -> None:
    per_process, runs, results = int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text("utf-8")), Path(sys.argv[3])
    session = mpi_session()
    found = []
    for fields in runs:
        config = RunConfig(**fields, ranks=session.processes * per_process, ranks_per_process=per_process, world="mpi")
        there = zerosim.run(config, keep_events=True)
        if session.process == 0:
            rule = "direct" if config.world.algorithm == "native" else config.world.algorithm
            here = zerosim.run(config.replace(world="threads", ranks_per_process=1, collective=rule), keep_events=True)
            rows = [row for rank in there.traffic for row in rank if row.purpose == "states"]
            found.append(
                {
                    "differences": differences(there, here),
                    "distance": distance(there, here),
                    "sent": sorted({str(row.sent_bytes) for row in rows}),
                    "modelled": [row.modelled_bytes for row in rows],
                    "payload": [row.payload_bytes for row in rows],
                    "direct": [row.payload_bytes for rank in here.traffic for row in rank if row.purpose == "states"],
                }
            )
    if session.process == 0:
        results.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main()
