"""A run on shapes alone: any model, any number of ranks, every byte counted and no value computed.

The program is that of `train/run.py`: the same model, strategy and loop, over a backend without data
(`backends/meta.py`) and a transport on which nobody meets (`comm/transports/fake.py`). So memory and traffic are
those of a real run, record by record.

Owns which ranks have to be run. What a rank does depends on its number in few ways: the padding at
the end of its slices, the units it owns, the share it adds of a buffer that N does not divide. Ranks
that agree in all of them leave the same bytes, and one stands for all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zerosim.backends.kernels import Backend
from zerosim.comm.runtime import Context, World, launch_alone, make_backend
from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.device.events import Event, Launch
from zerosim.dtypes import dtype, int64
from zerosim.errors import OutOfMemory
from zerosim.ledger.activations import ActivationLedger
from zerosim.ledger.memory import MemoryLedger
from zerosim.ledger.traffic import CommLedger
from zerosim.optim.updater import StepReport, Updater
from zerosim.train import engine
from zerosim.train.build import build_model, build_rank, build_updater, layout_of, place_rank
from zerosim.train.result import RankMemory, RunResult

DEFAULT_STEPS = 1


def plan(
    config: RunConfig,
    *,
    every_rank: bool = False,
    skipped: Collection[int] = (),
    keep_events: bool = False,
) -> RunResult:
    """What `run` would count of memory and traffic, on shapes alone; `config.optim.steps` or one step.

    `every_rank` runs each rank instead of one of each class, as a check. `skipped` are the steps that
    overflow (there are no values to tell), as a real run reported them. What is about values in
    `config` (data, weights, tokens, sample) is not read.

    Raises: InputError, OutOfMemory (where the configuration has a capacity).
    """
    model = build_model(config, Device(0, make_backend("meta")))
    layout = layout_of(config, model)
    steps = config.optim.steps or DEFAULT_STEPS
    first = _run_rank(config, 0, steps, skipped, keep_events)
    ranks = range(config.mesh.ranks)
    around = (-1, 0, 1) if config.world.algorithm == "ring" else (0,)  # a ring passes on its neighbours' shares
    stands_for = list(ranks) if every_rank else layout.classes(first.uneven, around)
    left = {rank: _run_rank(config, rank, steps, skipped, keep_events) for rank in sorted(set(stands_for) - {0})}
    left[0] = first
    return RunResult(
        config=config,
        layout=layout,
        num_parameters=model.num_parameters,
        tied_numel=model.tied_numel,
        losses=[],
        steps=first.reports,
        memory=[left[rank].memory for rank in stands_for],
        traffic=[left[rank].traffic for rank in stands_for],
        weights={},
        sample=None,
        live_bytes_after=[left[rank].live_bytes_after for rank in stands_for],
        events=[left[rank].events for rank in stands_for] if keep_events else [],
        stands_for=stands_for,
        saved=first.activations.saved(),
        saved_again=first.activations.saved_again(),
    )


def peak_of(config: RunConfig) -> int:
    """The highest peak over ranks of one step, in bytes."""
    return sum(peak_within(config, None).values())


def peak_within(config: RunConfig, capacity: int | None) -> Mapping[str, int]:
    """Bytes by kind at the highest peak over ranks of one step; the first rank that asks for more than `capacity`
    ends it, and the bytes are those that it would have had then."""
    try:
        memory = plan(config.replace(capacity=capacity, steps=1)).memory
    except OutOfMemory as error:
        return {**error.live, error.kind: error.live.get(error.kind, 0) + error.requested}
    return max((rank.peak for rank in memory), key=lambda peak: peak.total_bytes).by_kind


@dataclass(frozen=True, slots=True)
class _RankOutcome:
    memory: RankMemory
    traffic: list[Any]
    reports: list[StepReport]
    live_bytes_after: int
    events: list[Event]
    uneven: Collection[tuple[tuple[str, ...], int]]
    activations: ActivationLedger


def _run_rank(config: RunConfig, rank: int, steps: int, skipped: Collection[int], keep_events: bool) -> _RankOutcome:
    memory, traffic, activations = MemoryLedger(), CommLedger(), ActivationLedger()
    uneven = _UnevenReductions()

    def program(ctx: Context) -> Updater:
        updater = build_updater(config, steps, _Told)
        updater.skipped = skipped
        model, strategy = build_rank(ctx, config, updater)
        place_rank(ctx, model, strategy, lambda flat: None)
        for _ in engine.train(model, _batches(config, steps, ctx.device.backend), strategy, ctx.device):
            pass
        return updater

    world = World(
        config.mesh.ranks,
        backend="meta",
        collective=config.world.algorithm,
        bucket_bytes=config.parallel.bucket_bytes,
        capacity=config.memory.capacity,
        keep_events=keep_events,
    )
    try:
        updater, events = launch_alone(program, world, rank, (memory, traffic, activations, uneven))
    except OutOfMemory as error:
        error.live = dict(memory.refusal.by_kind) if memory.refusal else {}
        raise
    return _RankOutcome(
        RankMemory(dict(memory.marks), memory.peak),
        traffic.rows(),
        updater.reports,
        memory.live_bytes,
        events,
        uneven.found,
        activations,
    )


class _Told(Updater):
    """The optimizer step of a run without values, which is told at which steps its gradients overflow."""

    skipped: Collection[int] = ()

    def judge(self, scaled_norm: float) -> float | None:
        return super().judge(math.inf if len(self.reports) in self.skipped else scaled_norm)


def _batches(config: RunConfig, steps: int, backend: Backend) -> Iterator[list[Any]]:
    """Token ids that take no memory, in the shapes of one rank's micro-batches."""
    rows = backend.empty((config.data.micro_batch, config.model.seq + 1), int64)
    for _ in range(steps):
        yield [rows] * config.data.accumulate


class _UnevenReductions:
    """Reads all_reduce calls that their group does not divide, as (axes, elements): members add unlike shares."""

    def __init__(self) -> None:
        self.found: set[tuple[tuple[str, ...], int]] = set()

    def read(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Launch) and event.op == "all_reduce":
                numel = event.payload_bytes // dtype(event.dtype).itemsize
                if numel % len(event.group):
                    self.found.add((tuple(event.axis.split("+")), numel))
