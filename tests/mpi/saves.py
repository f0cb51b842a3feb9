"""Runs over MPI that save their state, or go on from one that threads saved.

    mpirun -n 2 python saves.py RANKS_PER_PROCESS FOLDER RUNS RESULTS

RUNS is a JSON list of RunConfig fields. In FOLDER each has a folder of its own, by its number, in which `threads` is
what a run on threads saved after two steps. RESULTS gets what each run over MPI leaves: `whole`, which saves into
`mpi`, and `later`, which goes on from the threads' step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import zerosim
from zerosim.comm.transports.mpi.session import mpi_session
from zerosim.config import RunConfig
from zerosim.train.result import RunResult


def left_by(result: RunResult) -> dict[str, Any]:
    """The losses, and the weights as text, equal if all bits are."""
    weights = {name: values.tobytes().hex() for name, values in result.weights.items()}
    return {"losses": repr(result.losses), "weights": weights}


def main() -> None:
    per_process, place = int(sys.argv[1]), Path(sys.argv[2])
    runs, results = json.loads(Path(sys.argv[3]).read_text("utf-8")), Path(sys.argv[4])
    session = mpi_session()
    found = []
    for number, fields in enumerate(runs):
        folder = place / str(number)
        fields |= dict(ranks=session.processes * per_process, ranks_per_process=per_process, world="mpi")
        how = fields.pop("save_as", None)
        whole = zerosim.run(RunConfig(**fields, save_state=str(folder / "mpi"), save_every=2, save_as=how))
        later = zerosim.run(RunConfig(**fields, resume=str(folder / "threads" / "step-00000002")))
        if session.process == 0:
            found.append({"whole": left_by(whole), "later": left_by(later)})
    if session.process == 0:
        results.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main()
