"""Training on backend cuda over MPI, each run compared by process 0 with the same one on threads.

    mpirun -n 2 python cuda_runs.py aware|staged RANKS_PER_PROCESS RESULTS

'aware' lets the library read the devices' memory whatever it says of itself: on the stand-in that is the host's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

if os.environ["ZEROSIM_TESTS_GPU"] == "0":  # conftest.py found none
    sys.path.insert(0, str(Path(__file__).parent.parent / "standin"))

import zerosim
from zerosim.comm.transports.mpi import transport as mpi
from zerosim.comm.transports.mpi.session import mpi_session
from zerosim.config import RunConfig

TINY: dict[str, Any] = dict(layers=1, hidden=16, heads=2, seq=8, micro_batch=1, steps=2, precision="fp32")
RUNS: list[dict[str, Any]] = [
    dict(stage=3),
    dict(stage=0, collective="ring", bucket_bytes=256),
    dict(stage=2, partition="owner"),
    dict(stage=3, hidden=96, precision="bf16"),  # larger than a header
]


def main() -> None:
    way, per_process, results = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    mpi.is_gpu_aware = lambda: way == "aware"  # type: ignore[assignment]
    session = mpi_session()
    ranks, found = session.processes * per_process, []
    for fields in RUNS:
        config = RunConfig(
            **{**TINY, **fields}, backend="cuda", world="mpi", ranks=ranks, ranks_per_process=per_process
        )
        there = zerosim.run(config)
        if session.process:
            continue
        here = zerosim.run(config.replace(world="threads", ranks_per_process=1))
        rows = there.traffic[0]
        found.append(
            {
                "same": there.losses == here.losses
                and all(there.weights[name].tobytes() == array.tobytes() for name, array in here.weights.items()),
                "explained": all(row.unexplained_bytes == 0 for memory in there.memory for row in memory.pool),
                "out": sum(row.payload_bytes for row in rows if row.op == "device to host"),
                "back": sum(row.payload_bytes for row in rows if row.op == "host to device"),
                "sent": sum(row.sent_bytes or 0 for row in rows if row.purpose != "staging"),
                "received": sum(row.received_bytes or 0 for row in rows if row.purpose != "staging"),
                "states": [row for row in rows if row.purpose != "staging"] == here.traffic[0],
            }
        )
    if session.process == 0:
        results.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main()
