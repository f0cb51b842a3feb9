"""The bandwidth at which a step of stage 3 takes 1.2 times stage 1's: by the clock, and measured (by hand, as root).

    python tests/mpi/break_even.py [--model 0.8M] [--machine machine.toml]

Two hosts that are network namespaces (`namespaces.py`) are measured with links that nothing holds back. That gives the
clock its figures, and no link that is slowed is ever shown to it: it is told a NIC of so many bytes per second, and
asked where the two stages are 1.2 apart. Then `tc tbf` slows the links, and real steps are taken at several rates on
both sides of what it said.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median

from namespaces import Cluster, cluster, mpirun, refusal

from zerosim.bench.machine import OtherLoad
from zerosim.bench.predict import MODELS, modelled, steps_of
from zerosim.comm.transports.mpi.session import mpi_session
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import cluster_of
from zerosim.config.presets.hardware import find_hardware

RATIO = 1.2
AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Measured at these times the bandwidth that the clock says."""
ROUNDS, STEPS = 4, 2


def config_of(model: str, stage: int) -> RunConfig:
    return MODELS[model].replace(stage=stage, ranks=2, precision="fp32", world="mpi")


def ratio_by_clock(model: str, machine: str, bandwidth: float) -> float:
    """Stage 3 over stage 1, with a NIC of so many bytes per second on each host of one rank."""
    there = cluster_of(find_hardware(machine), node_gpus=1, nic_bytes_per_s=bandwidth)
    third, first = (modelled(config_of(model, stage), there).seconds for stage in (3, 1))
    return third / first


def break_even(model: str, machine: str) -> float | None:
    """Bytes per second, by bisection in the logarithm; None where the stages are never, or always, as far apart."""
    low, high = 1e5, 1e11
    if not ratio_by_clock(model, machine, low) > RATIO > ratio_by_clock(model, machine, high):
        return None
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if ratio_by_clock(model, machine, middle) > RATIO else (low, middle)
    return math.sqrt(low * high)


def slow(there: Cluster, bandwidth: float) -> None:
    """Hold every host's link to so many bytes per second."""
    burst = max(32_000, round(bandwidth / 500))
    words = f"tc qdisc replace dev eth0 root tbf rate {round(8 * bandwidth)}bit burst {burst} latency 500ms"
    for host in there.hosts:
        subprocess.run(["nsenter", "--target", str(host.pid), "--net", *words.split()], check=True, timeout=60)


def on_both(there: Cluster, *words: str) -> str:
    command, environment = mpirun(there, 2, sys.executable, *words)
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, encoding="utf-8", check=True,
        timeout=3600,
    )  # fmt: skip
    return done.stdout


def worker(model: str) -> None:
    """On each host: steps of both stages, in turn; the first says what each took."""
    session = mpi_session()
    taken: dict[int, list[float]] = {1: [], 3: []}
    for number in range(ROUNDS):
        for stage in (1, 3) if number % 2 else (3, 1):
            taken[stage] += [step.seconds for step in steps_of(config_of(model, stage), STEPS, session.exchange)]
    if session.process == 0:
        print(json.dumps(taken))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="0.8M")
    parser.add_argument("--machine", metavar="FILE", help="measured here before; else it is measured first")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.model)
        return 0
    why = refusal()
    if why is not None:
        parser.error(why)
    with tempfile.TemporaryDirectory() as folder, cluster(2, 2) as there:
        machine, load = args.machine or str(Path(folder, "machine.toml")), OtherLoad()
        if args.machine is None:
            on_both(there, "-m", "zerosim", "calibrate", "--world", "mpi", "--steps", "none", "-o", machine, "-q")
        said = break_even(args.model, machine)
        print(f"{args.model}, 2 hosts of one rank, fp32, MPI over TCP; links held by tc tbf", flush=True)
        if said is None:
            print(f"by the clock no bandwidth makes stage 3 {RATIO} times stage 1")
            return 1
        print(f"by the clock stage 3 takes {RATIO} x stage 1 at {said / 1e6:.1f} MB/s")
        print("MB/s    stage 1, s   stage 3, s   measured   by the clock", flush=True)
        found: list[tuple[float, float]] = []
        for factor in AROUND:
            slow(there, said * factor)
            taken = json.loads(on_both(there, __file__, "--worker", "--model", args.model).splitlines()[-1])
            first, third = median(taken["1"]), median(taken["3"])
            found.append((said * factor, third / first))
            clock = ratio_by_clock(args.model, machine, said * factor)
            print(
                f"{said * factor / 1e6:7.1f} {first:10.3f} {third:12.3f} {third / first:10.3f} {clock:12.3f}",
                flush=True,
            )
        others = load.share()
    measured = crossing(found)
    if measured is None:
        print(f"measured, no bandwidth between these makes it {RATIO}")
    else:
        print(f"measured: {measured / 1e6:.1f} MB/s; the clock is off by {100 * (said / measured - 1):+.0f} %")
    print(f"other processes took {100 * (others or 0):.0f} % of the cores, with mpirun's own counted among them")
    return 0


def crossing(found: list[tuple[float, float]]) -> float | None:
    """Where the ratio falls through RATIO as bandwidth grows, between two measured ones."""
    for (low, above), (high, below) in pairwise(found):
        if above >= RATIO > below:
            return low * (high / low) ** ((above - RATIO) / (above - below))
    return None


if __name__ == "__main__":
    sys.exit(main())
