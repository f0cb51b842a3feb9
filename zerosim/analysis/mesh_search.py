"""The best meshes: how a model is cut, its ZeRO stage, microbatches, recompute and schedule, by the clock or by memory.

Every candidate of as many ranks has the same global batch. Three answers are had of one, each dearer than the one
before, and the candidate with the least is asked next:

- a bound: no step ends before its own kernels could have, had they nothing to wait for (`least_seconds`);
- an estimate, out of plans of few blocks: blocks are alike, and one more adds what the one before it did;
- a plan of the whole model. What is said to fit, and its time, are its.

So what is left when the best ten are known needs longer for its kernels alone, or by its estimate. Of one mesh, stage
and microbatch the least recompute that fits is kept. That more rows and less recompute never take less memory is taken
for granted, as in every search (`search.py`): where some rows do not fit, no more are tried with the same recompute,
but for all of them at once, which need no sums of gradients. What else may help one of the best is tried beside it: a
schedule, overlap, replicas, stage 0, whole rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from zerosim.analysis.meshes import arranged, ladders, mesh_values
from zerosim.comm.runtime import make_backend
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.device.device import Device, Kind, Phase
from zerosim.device.events import Kernel, Launch
from zerosim.device.work import MATMUL
from zerosim.dtypes import dtype
from zerosim.errors import InputError
from zerosim.ledger.clock import StepTime
from zerosim.ledger.costs_of import costs_of
from zerosim.train.build import build_model
from zerosim.train.plan import Figures, plan

MOST = 5
BOUND, ESTIMATE = 0, 1
NODE = 8
"""GPUs of a node, where nothing says how many."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """A configuration that fits: the most that a rank takes from its device, and how long its step takes."""

    config: RunConfig
    peak_bytes: int
    time: StepTime | None

    @property
    def value(self) -> tuple[float, int]:
        """What it is ranked by: seconds, where there is a clock, then bytes."""
        return (0.0 if self.time is None else self.time.seconds), self.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, without the time."""
        return {**mesh_values(self.config), "peak_bytes": self.peak_bytes}


@dataclass(frozen=True, slots=True)
class Meshes:
    """What was found, the best first; how many ways there are to cut model and batch, how many configurations were
    estimated and how many planned whole, and how many did not fit. `ended`: False where it was stopped: there may be
    better ones."""

    found: Sequence[Fitting]
    candidates: int
    estimated: int
    planned: int
    too_much: int
    ended: bool = True


class Trials(NamedTuple):
    """What a search asks of a configuration: a bound on its seconds, what its step takes on devices without a limit,
    what it takes where it fits, and the bytes that there are for it."""

    bound: Callable[[RunConfig], float]
    unlimited: Callable[[RunConfig], Figures]
    within: Callable[[RunConfig], Figures | None]
    room: Callable[[RunConfig], int]


Say = Callable[[RunConfig, Figures | None], None]


class Stopped(Exception):
    """No more time."""


def best_meshes(
    config: RunConfig,
    global_batch: int,
    trials: Trials,
    *,
    node: int = NODE,
    schedule: Mapping[str, Any] = MappingProxyType({}),
    check_time: Callable[[], None] = lambda: None,
    say: Say = lambda config, figures: None,
    most: int = MOST,
) -> Meshes:
    """The best on `config`'s ranks, with so many rows in a step; pipelines with that `schedule`. `check_time` raises
    Stopped when time is up.

    Raises: KeyboardInterrupt while nothing has been found. Later it ends the search with what there is.
    """
    families, least_bytes = list(ladders(config, global_batch, node, schedule)), least_memory(config)
    waiting = [((trials.bound(family[0]), 0), BOUND, number, 0) for number, family in enumerate(families)]
    heapq.heapify(waiting)
    found: list[Fitting] = []
    estimates: list[bool] = []
    plans: list[bool] = []
    hopeless: dict[RunConfig, bool] = {}
    refused: dict[RunConfig, int] = {}  # by `_one_row`: the fewest rows of those that do not fit
    seen = {family[0] for family in families}

    def estimated(asked: RunConfig) -> tuple[float, int] | None:
        one, rows = _one_row(asked), asked.data.micro_batch
        if asked.data.accumulate > 1 and rows >= refused.get(one, rows + 1):
            return None
        if least_bytes(asked) > trials.room(asked):
            return None
        value = estimate(asked, trials.unlimited)
        estimates.append(value[1] <= trials.room(asked))
        if not estimates[-1] and asked.data.accumulate > 1:
            refused[one] = rows
        return value if estimates[-1] else None

    def whole(asked: RunConfig) -> bool:
        figures = trials.within(asked)
        say(asked, figures)
        plans.append(figures is not None)
        if figures is not None:
            found.append(Fitting(asked, figures.peak_bytes, figures.time))
            found.sort(key=lambda one: one.value)
            del found[most:]
        return figures is not None

    def next_of(number: int, level: int) -> None:
        """More recompute, where that may help."""
        smallest = _one_row(families[number][-1])
        if smallest not in hopeless:
            room = trials.room(smallest)
            hopeless[smallest] = least_bytes(smallest) > room or estimate(smallest, trials.unlimited)[1] > room
        if not hopeless[smallest] and level + 1 < len(families[number]):
            heapq.heappush(waiting, ((trials.bound(families[number][level + 1]), 0), BOUND, number, level + 1))

    def ask() -> None:
        _, what, number, level = heapq.heappop(waiting)
        asked = families[number][level]
        if what == BOUND:
            if hopeless.get(_one_row(families[number][-1])):
                return
            if (guess := estimated(asked)) is not None:
                first = estimates.count(True) == 1  # planned at once: whoever waits sees a first answer early
                heapq.heappush(waiting, ((0.0, 0) if first else guess, ESTIMATE, number, level))
                return
        elif whole(asked):
            for other in beside(asked, node):
                if other not in seen:
                    seen.add(other)
                    families.append([other])
                    heapq.heappush(waiting, ((trials.bound(other), 0), BOUND, len(families) - 1, 0))
            return
        next_of(number, level)

    ended = False
    try:
        while waiting and not (len(found) == most and waiting[0][0] >= found[-1].value):
            check_time()
            ask()
        ended = True
    except (KeyboardInterrupt, Stopped) as error:
        for _, what, number, level in sorted(waiting) if not found else ():  # the best that was estimated
            if what == ESTIMATE and not found:
                whole(families[number][level])
        if not found and isinstance(error, KeyboardInterrupt):
            raise
    too_much = [*estimates, *plans].count(False)
    return Meshes(found, len(families), len(estimates), len(plans), too_much, ended)


def _one_row(asked: RunConfig) -> RunConfig:
    """The same with one row at a time, as few times as the schedule allows: nothing with more of them takes less."""
    return asked.replace(micro_batch=1, accumulate=asked.parallel.fewest_micro_batches(asked.mesh.pp))


def least_memory(config: RunConfig) -> Callable[[RunConfig], float]:
    """How many bytes the fullest rank of a configuration holds at least: an even share of the parameters, of Adam's
    moments and masters; and on the first stage of a pipeline, before its first backward, what blocks keep of as many
    microbatches as there are stages."""
    numel = build_model(config, Device(0, make_backend("meta"))).num_parameters

    @cache
    def kept(one: RunConfig) -> float:
        """Of one microbatch by one block."""
        every = max(1, one.memory.again.every)
        marks = [plan(one.replace(layers=count * every)).memory[0].marks["end_of_forward"] for count in (1, 2)]
        few, more = (mark.by_kind.get(Kind.ACTIVATION, 0) + mark.by_kind.get(Kind.KEPT, 0) for mark in marks)
        return (more - few) / every

    def least(asked: RunConfig) -> float:
        mesh, stage, precision = asked.mesh.axes, asked.parallel.zero_stage, asked.precision
        each = dtype(precision.stored).itemsize / (mesh.dp_shard if stage == 3 else 1)
        if asked.optim.optimizer in ("adam", "adamw"):
            each += (8 + 4 * precision.has_masters) / (mesh.dp_shard if stage else 1)
        one = arranged(asked, mesh.tp, mesh.tp, 1, 0, accumulate=1, steps=1)
        assert one is not None  # a mesh of tp alone is one
        live = min(mesh.pp, asked.data.accumulate) * (asked.model.layers // mesh.pp)
        return each * numel / (mesh.tp * mesh.pp) + live * kept(one)

    return least


def estimate(config: RunConfig, unlimited: Callable[[RunConfig], Figures]) -> tuple[float, int]:
    """Seconds and bytes of a step, out of plans of one and two blocks a chunk; each further one adds as much."""
    few = config.mesh.pp * config.parallel.num_chunks * max(1, config.memory.again.every)
    layers = config.model.layers
    if layers <= 3 * few or config.parallel.balance_ends:
        return _value(unlimited(config))
    (first, least), (second, more) = (_value(unlimited(config.replace(layers=count * few))) for count in (1, 2))
    times = layers / few - 1
    return first + times * (second - first), round(least + times * (more - least))


def _value(figures: Figures) -> tuple[float, int]:
    return (0.0 if figures.time is None else figures.time.seconds), figures.peak_bytes


def beside(config: RunConfig, node: int) -> Iterator[RunConfig]:
    """The same mesh with another schedule, with overlap, with replicas that each fill a node; not what was given."""
    mesh, given = config.mesh, config.given
    tried: list[dict[str, Any]] = [{"stage": 0}] if config.parallel.zero_stage == 1 else []
    if config.parallel.sequence_parallel:
        tried.append({"sequence_parallel": False, "keep_gathered": False})
    if "overlap" not in given:
        tried.append({"overlap": "all"})
    if mesh.pp > 1 and "pipeline" not in given:
        chunks = [count for count in (2, 4) if config.model.layers % (mesh.pp * count) == 0]
        tried += [{"pipeline": "interleaved", "virtual_stages": count} for count in chunks]
        tried += [{"pipeline": kind, "virtual_stages": None} for kind in ("zb-h1", "zb-v")]
    shards = max(1, node // mesh.tp)
    if config.parallel.zero_stage == 3 and mesh.dp_replicate == 1 and 1 < shards < mesh.axes.dp_shard:
        tried.append({"dp_replicate": mesh.axes.dp_shard // shards})
    for values in tried:
        with suppress(InputError):  # a schedule may not have so many micro-batches
            changed = config.replace(**values)
            if changed != config:
                yield changed


def least_seconds(cluster: Cluster) -> Callable[[RunConfig], float]:
    """How long a configuration's step takes at least, by the clock.

    Whatever the mesh, stage and recipe are, each micro-batch goes through the forward of every unit and the products
    of its backward, and waits for tensor parallelism's collectives in between: t seconds, over all pipeline stages.
    Stage i of p takes t_i of them, and m t_i for m micro-batches, while one of them has to come through the stages
    before it, both ways: m t_i + (t_1 + ... + t_(i-1)). However t is divided, for one i that is at least
    t / (1 - (1 - 1/m)^p), which is m t without a pipeline. An interleaved one begins sooner: m t / p, and t; so does
    one whose weight gradients run apart, for m >= p. Blocks are alike: t is that of a few, and as much more for each of
    the others.
    """

    @cache
    def kernels(config: RunConfig) -> float:
        every = max(1, config.memory.again.every)  # of so many blocks one runs again
        if config.model.has_blocks and config.model.layers > 2 * every:
            one, two = (kernels(config.replace(layers=count * every)) for count in (1, 2))
            return one + (config.model.layers // every - 1) * (two - one)
        events, costs = plan(config, keep_events=True).events[0], costs_of(config, cluster)
        seconds = sum(costs.kernel(event) for event in events if isinstance(event, Kernel) and _in_all(event))
        if config.clock.tp_comm_overlap:
            return seconds
        return seconds + sum(
            costs.collective(event) for event in events if isinstance(event, Launch) and _blocks(event)
        )

    def bound(config: RunConfig) -> float:
        tp, stages, batches = config.mesh.tp, config.mesh.pp, config.data.accumulate
        one = arranged(config, tp, tp, 1, 0, accumulate=1, steps=1)
        assert one is not None  # a mesh of tp alone is one
        if config.parallel.pipeline_schedule in ("interleaved", "zb-h1", "zb-v"):
            return kernels(one) * max(1.0, batches / stages)
        return kernels(one) / (1 - (1 - 1 / batches) ** stages)

    return bound


def _in_all(kernel: Kernel) -> bool:
    """Whether a record has it at every stage and with every recipe. Sums, casts and copies of gradients differ."""
    of_backward = kernel.scope.phase == Phase.BACKWARD and kernel.engine == MATMUL
    return kernel.work is None and (kernel.scope.phase == Phase.FORWARD or of_backward)


def _blocks(launch: Launch) -> bool:
    """Whether compute waits for a collective where it is launched."""
    return launch.axis == "tp" and launch.scope.phase in (Phase.FORWARD, Phase.BACKWARD)
