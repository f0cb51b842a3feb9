"""Compare measured steps of several ranks on this machine with the clock's predictions. Nothing here is fitted.

Configurations take turns several times. A step is timed on the wall clock between two barriers. The result is the
median of the steps without load from other programs or, if those are rare, of the quietest steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from zerosim.bench.calibrate import Gather
from zerosim.bench.contest import Progress
from zerosim.bench.machine import busy_s
from zerosim.bench.training import TIMEOUT_S, initial_weights, one_thread, own_rows, random_tokens, train_from
from zerosim.comm.runtime import Context, launch
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.machine_file import Machine
from zerosim.device.recorder import Reader
from zerosim.ledger.clock import StepTime
from zerosim.ledger.memory import MemoryLedger
from zerosim.ledger.traffic import CommLedger
from zerosim.train.delayed import one_step
from zerosim.train.plan import plan
from zerosim.train.world import world_of

STAGES = (1, 2, 3)
QUIET, FEWEST = 0.1, 3
"""The most that other programs may use of the cores in a step that counts, and the number of such steps to collect."""

_STEP: dict[str, Any] = {"lr": 1e-4, "vocab": 256}
MODELS: Mapping[str, RunConfig] = {
    "0.8M": RunConfig(**_STEP, layers=4, hidden=128, heads=4, seq=128, micro_batch=16),
    "3.3M": RunConfig(**_STEP, layers=4, hidden=256, heads=4, seq=256, micro_batch=4),
    "10.7M": RunConfig(**_STEP, layers=6, hidden=384, heads=6, seq=256, micro_batch=8),
}
"""Rows per rank."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A step of `ranks` ranks: modelled and measured seconds. The measured value is over `counted` of `steps`, in which
    other programs used at most `others` of the cores' time (None: unknown).

    `modelled_cpu_s` and `cpu_s` are a rank's CPU time, which does not depend on other programs' load. One thread
    copies while the rest sleep. They are None over MPI, where waiting uses CPU time too.
    """

    model: str
    stage: int
    ranks: int
    modelled_s: float
    measured_s: float
    modelled_cpu_s: float | None
    cpu_s: float | None
    counted: int
    steps: int
    others: float | None

    @property
    def error(self) -> float:
        """Modelled seconds over measured seconds, minus 1."""
        return self.modelled_s / self.measured_s - 1

    @property
    def cpu_error(self) -> float | None:
        return None if self.cpu_s is None or self.modelled_cpu_s is None else self.modelled_cpu_s / self.cpu_s - 1

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {
            "error": self.error,
            "cpu_error": self.cpu_error,
        }


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of one step, the CPU seconds of all its ranks, and the share of all cores' time that other programs used
    meanwhile."""

    seconds: float
    cpu_s: float
    others: float | None


def compare(
    models: Mapping[str, RunConfig],
    cluster: Cluster,
    progress: Progress,
    *,
    passes: int = 3,
    steps: int = 2,
    stages: tuple[int, ...] = STAGES,
    gather: Gather | None = None,
) -> list[Compared]:
    """Compare every model at every ZeRO stage. Raises: ValueError for a cluster that was not measured."""
    machine = cluster.measured
    if not isinstance(machine, Machine):
        raise ValueError(f"{cluster.name} was not measured")
    configs = {
        (name, stage): config.replace(
            stage=stage, ranks=machine.ranks, precision=machine.precision, world=machine.transport,
            parallel=machine.ranks if machine.transport == "threads" else 1,
        )
        for name, config in models.items()
        for stage in stages
    }  # fmt: skip
    taken: dict[tuple[str, int], list[Step]] = {key: [] for key in configs}
    order = list(configs)
    with one_thread():
        for number in range(passes):
            for key in order:
                progress(f"steps of {machine.ranks} ranks, pass {number + 1} of {passes}: {key[0]}, stage {key[1]}")
                taken[key] += steps_of(configs[key], steps, gather)
            order.reverse()
    return [_compared(name, config, taken[name, stage], cluster) for (name, stage), config in configs.items()]


def modelled(config: RunConfig, cluster: Cluster) -> StepTime:
    """Return the seconds of a step by the clock."""
    found = plan(one_step(config.replace(world="threads")), cluster=cluster).time
    assert found is not None
    return found


def _compared(model: str, config: RunConfig, steps: list[Step], cluster: Cluster) -> Compared:
    quiet = sorted(steps, key=lambda step: step.others or 0.0)
    counted = [step for step in quiet if (step.others or 0.0) <= QUIET]
    if len(counted) < FEWEST:
        counted = quiet[:FEWEST]
    known = [step.others for step in counted if step.others is not None]
    found, ranks = modelled(config, cluster), config.mesh.ranks
    modelled_cpu_s = cpu_s = None
    if config.world.transport == "threads":
        modelled_cpu_s = found.compute + sum(found.exposed.values()) / ranks
        cpu_s = median(step.cpu_s for step in steps) / ranks
    return Compared(
        model,
        config.parallel.zero_stage,
        ranks,
        found.seconds,
        median(step.seconds for step in counted),
        modelled_cpu_s,
        cpu_s,
        len(counted),
        len(steps),
        max(known) if known else None,
    )


def steps_of(config: RunConfig, steps: int, gather: Gather | None = None) -> list[Step]:
    """Measure that number of steps of a real run, after one warm-up step. Over MPI every process returns the same."""
    weights, tokens = initial_weights(config), random_tokens(config)
    stamps: list[tuple[float, float, float]] = []

    def program(ctx: Context) -> None:
        for _ in train_from(ctx, config, weights, batches(ctx)):
            pass

    def batches(ctx: Context) -> Iterator[list[Any]]:
        own = own_rows(ctx, config, tokens)
        for number in range(steps + 2):
            ctx.comm.barrier()
            if ctx.rank % config.world.ranks_per_process == 0 and (ctx.rank == 0 or config.world.transport == "mpi"):
                stamps.append((time.perf_counter(), busy_s() or 0.0, time.process_time()))
            if number <= steps:
                yield own

    def readers(rank: int) -> tuple[Reader, ...]:
        return MemoryLedger(), CommLedger()

    launch(program, replace(world_of(config), timeout_s=TIMEOUT_S), readers)
    everyone = (gather or (lambda value: [value]))(stamps)
    return [_step(everyone, number) for number in range(1, steps + 1)]


def _step(everyone: list[list[tuple[float, float, float]]], number: int) -> Step:
    """Measure one step by the first process's clock. CPU time of any of our processes is not another program's."""
    (began, busy, _), (ended, later, _) = everyone[0][number : number + 2]
    own = sum(stamps[number + 1][2] - stamps[number][2] for stamps in everyone)
    if busy_s() is None:
        return Step(ended - began, own, None)
    share = (later - busy - own) / ((ended - began) * (os.cpu_count() or 1))
    return Step(ended - began, own, min(1.0, max(0.0, share)))


def said_error(compared: list[Compared]) -> str:
    """Describe the clock's error for a file: '-7 to +4 % of 9 measured steps of 2 ranks', and the disturbances
    of those steps."""
    text = f"{_span([one.error for one in compared])} of {len(compared)} measured steps of {compared[0].ranks} ranks"
    others = max(one.others or 0.0 for one in compared)
    if others > QUIET:
        text += f", while others took up to {100 * others:.0f} % of the cores"
    cpu = [one.cpu_error for one in compared if one.cpu_error is not None]
    return f"{text}; {_span(cpu)} of a rank's CPU time" if cpu else text


def _span(errors: list[float]) -> str:
    return f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f} %"
