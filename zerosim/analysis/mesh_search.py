"""Find the best meshes: cuts of weights, rows and layers, ZeRO stage, microbatches, recompute and schedule, by the
clock or by memory.

All candidates of a search have the same global batch. The search evaluates a candidate in three steps of rising cost.
It always continues with the candidate of the lowest value:

- a bound: no step is shorter than its own kernels without any waiting (`least_seconds`);
- an estimate from plans of a few blocks: blocks are alike, so each further block adds as much as the one before;
- a plan of the whole model. The reported memory and time come from this plan.

When the ten best are known, every other candidate needs longer for its kernels alone, or by its estimate. For one mesh,
ZeRO stage and microbatch the search keeps the least recompute that fits. It assumes, as every search here
(`search.py`), that more rows and less recompute never need less memory. If some rows do not fit, it tries no more rows
with the same recompute, except all rows at once, which need no sums of gradients. Beside each of the best it tries a
schedule, overlap, replicas, ZeRO stage 0, whole rows and other ways to share rows and experts. Rows are cut over more
ranks where one row fits with no recompute, and beside the best in place of recompute.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from zerosim.analysis.candidate import accepted, candidate, with_micro_batches
from zerosim.analysis.capabilities import context, experts, offload, paging, pipeline, tensor
from zerosim.analysis.facts import frozen_of
from zerosim.analysis.meshes import arranged, ladder, ladders, mesh_values, wider
from zerosim.analysis.recompute import differ, first_period, period_of, recompute_of
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
from zerosim.placement.mesh import CUTS
from zerosim.train.build_model import build_model
from zerosim.train.check_model import check_model
from zerosim.train.check_trained import is_of_experts
from zerosim.train.plan import Figures, plan

MOST = 5
BOUND, ESTIMATE = 0, 1
NODE = 8
"""GPUs per node, if not given."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """A configuration that fits: the peak bytes on a rank's device, and the time of its step."""

    config: RunConfig
    peak_bytes: int
    time: StepTime | None

    @property
    def value(self) -> tuple[float, int]:
        """The rank in the list: by seconds, if there is a clock, then by bytes."""
        return (0.0 if self.time is None else self.time.seconds), self.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without the time."""
        return {**mesh_values(self.config), "peak_bytes": self.peak_bytes}


@dataclass(frozen=True, slots=True)
class Meshes:
    """The answers, best first; the number of ways to cut model and batch, of estimated configurations, of
    whole plans, and of those that did not fit. `ended`: False if the search was stopped, so there may be
    better ones."""

    found: Sequence[Fitting]
    candidates: int
    estimated: int
    planned: int
    too_much: int
    ended: bool = True


class Trials(NamedTuple):
    """The trials of a configuration: a bound on its seconds, its step on devices without a limit,
    its step if it fits, and the available bytes."""

    bound: Callable[[RunConfig], float]
    unlimited: Callable[[RunConfig], Figures]
    within: Callable[[RunConfig], Figures | None]
    room: Callable[[RunConfig], int]


Say = Callable[[RunConfig, Figures | None], None]


class Stopped(Exception):
    """The time limit is over."""


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
    """Find the best meshes on `config`'s ranks, with that many rows in a step; pipelines with that `schedule`.
    `check_time` raises Stopped when time is up.

    Raises: InputError if no candidate can be planned; KeyboardInterrupt before the first answer. Later an interrupt
    ends the search with the answers so far.
    """
    families, least_bytes = list(ladders(config, global_batch, node, schedule)), least_memory(config)
    waiting = [((trials.bound(family[0]), 0), BOUND, number, 0) for number, family in enumerate(families)]
    heapq.heapify(waiting)
    found: list[Fitting] = []
    estimates: list[bool] = []
    plans: list[bool] = []
    hopeless: dict[RunConfig, bool] = {}
    refused: dict[RunConfig, int] = {}  # by `_one_row`: the smallest number of rows that does not fit
    seen, whole_rows = {family[0] for family in families}, len(families)

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

    def add(family: list[RunConfig]) -> None:
        if family and family[0] not in seen:
            seen.add(family[0])
            families.append(family)
            heapq.heappush(waiting, ((trials.bound(family[0]), 0), BOUND, len(families) - 1, 0))

    def is_hopeless(family: Sequence[RunConfig]) -> bool:
        smallest = _one_row(family[-1])
        if smallest not in hopeless:
            room = trials.room(smallest)
            try:
                hopeless[smallest] = least_bytes(smallest) > room or estimate(smallest, trials.unlimited)[1] > room
            except InputError:  # no plan says so
                hopeless[smallest] = False
        return hopeless[smallest]

    def next_of(number: int, level: int) -> None:
        """Add the candidate with more recompute, if that may help; else the one whose rows are cut as far as needed."""
        family = families[number]
        if not is_hopeless(family):
            if level + 1 < len(family):
                heapq.heappush(waiting, ((trials.bound(family[level + 1]), 0), BOUND, number, level + 1))
            return
        if number >= whole_rows:  # a change of one whose rows are cut as needed
            return
        data = family[0].data
        rows = accepted([candidate(family[0], micro_batch=1, accumulate=data.micro_batch * data.accumulate)])
        cuts = [ladder(cut) for row in rows for cut in wider(row)]
        if cuts and not is_hopeless(cuts[-1]):
            add(next(cut for cut in cuts if not is_hopeless(cut)))

    def ask(what: int, number: int, level: int) -> bool:
        """Go on with a candidate. Return False if it needs too much memory."""
        asked = families[number][level]
        if what == BOUND:
            if hopeless.get(_one_row(families[number][-1])):
                return True
            if (guess := estimated(asked)) is None:
                return False
            first = estimates.count(True) == 1  # planned at once: a waiting person sees an answer early
            heapq.heappush(waiting, ((0.0, 0) if first else guess, ESTIMATE, number, level))
            return True
        if not whole(asked):
            return False
        for other in beside(asked, node):
            add([other])
        return True

    ended = interrupted = False
    refusal: InputError | None = None
    try:
        while waiting and not (len(found) == most and waiting[0][0] >= found[-1].value):
            check_time()
            _, what, number, level = heapq.heappop(waiting)
            try:
                is_done = ask(what, number, level)
            except InputError as error:  # a plan of it would take far too long, for one
                refusal, is_done = refusal or error, False
            if not is_done:
                next_of(number, level)
        ended = True
    except Stopped:
        pass
    except KeyboardInterrupt:  # handled below: there another one ends the search at once
        interrupted = True
    if not ended:
        for _, what, number, level in sorted(waiting) if not found else ():  # the best estimate
            if what == ESTIMATE and not found:
                whole(families[number][level])
        if not found and interrupted:
            raise KeyboardInterrupt
    if refusal is not None and not estimates and not plans:
        raise refusal
    too_much = [*estimates, *plans].count(False)
    return Meshes(found, len(families), len(estimates), len(plans), too_much, ended)


def _one_row(asked: RunConfig) -> RunConfig:
    """Return the configuration with one row per microbatch, and as few as the schedule allows: more rows never take
    less memory."""
    return with_micro_batches(asked, micro_batch=1).config or asked


def least_memory(config: RunConfig) -> Callable[[RunConfig], float]:
    """Return a lower bound on the device bytes of a configuration's fullest rank: an even share of the parameters, of
    Adam's moments and masters; and on the first pipeline stage, before its first backward, the saved activations of as
    many microbatches as there are pipeline stages."""
    model = build_model(config, Device(0, make_backend("meta")))
    shapes = {name: math.prod(shape) for name, shape in model.shapes().items()}
    stacks = sum(numel for name, numel in shapes.items() if is_of_experts(config.model, name))
    dense = model.num_parameters - stacks

    @cache
    def kept(one: RunConfig) -> float:
        """Return the bytes that one block saves of one microbatch."""
        every = period_of(one)
        shorter = _of_layers(one, every, first_period(one))
        if shorter is None or differ(one):  # the blocks behind those that are named save the most
            return 0.0
        marks = [plan(each).memory[0].marks["end_of_forward"] for each in shorter]
        few, more = (mark.by_kind.get(Kind.ACTIVATION, 0) + mark.by_kind.get(Kind.KEPT, 0) for mark in marks)
        return (more - few) / every

    def least(asked: RunConfig) -> float:
        mesh, stage, precision = asked.mesh.axes, asked.parallel.zero_stage, asked.precision
        has_params, has_states = (offload.is_here(asked, what) for what in ("params", "optimizer"))
        has_states = has_states and not paging.is_on(asked)
        whole, cut = (dense / mesh.tp + stacks / (mesh.ep * mesh.etp)), (dense + stacks) / (mesh.shards * mesh.tp)
        held = has_params * dtype(precision.stored).itemsize * (cut if stage == 3 else whole)
        if asked.optim.optimizer in ("adam", "adamw") and has_states:
            held += (8 + 4 * precision.has_masters) * (cut if stage else whole)
        one = _of_tp_alone(asked)
        live = min(mesh.pp, asked.data.accumulate) * (asked.model.layers // mesh.pp)
        return held / mesh.pp + (0.0 if one is None else live * kept(one))

    return least


def estimate(config: RunConfig, unlimited: Callable[[RunConfig], Figures]) -> tuple[float, int]:
    """Estimate a step's seconds and bytes from plans of one and two blocks per chunk; each further block adds as
    much."""
    (chunks, less), layers = pipeline.layer_steps(config), config.model.layers
    few, start = chunks * period_of(config), first_period(config)
    if layers <= (start + 2) * few or less:
        return _value(unlimited(config))
    if (shorter := _of_layers(config, few, start)) is None:
        return _value(unlimited(config))
    (first, least), (second, more) = (_value(unlimited(one)) for one in shorter)
    times = layers / few - start
    return first + times * (second - first), round(least + times * (more - least))


def _of_layers(config: RunConfig, few: int, start: int) -> list[RunConfig] | None:
    """Return the configuration with `start` times that many layers and with once more; None if other options need more,
    or if the names of trained parameters do."""
    shorter = list(accepted(candidate(config, layers=count * few) for count in (start, start + 1)))
    try:
        for one in shorter if frozen_of(config) is not None else ():
            check_model(one, build_model(one, Device(0, make_backend("meta"))))
    except InputError:
        return None
    return shorter if len(shorter) == 2 else None


def _of_tp_alone(config: RunConfig) -> RunConfig | None:
    """Return one microbatch on a mesh of tp and cp alone, on a device without a limit: it has the kernels and saves of
    every mesh with these. None if other options do not go with it."""
    tp = config.mesh.tp
    alone = {"accumulate": 1, "steps": 1, "ranks_per_node": 0, **experts.alone(config, tp)}
    return arranged(config, tp * config.mesh.cp, tp, 1, 0, **alone, allocator="exact", allocator_conf=None)


def _value(figures: Figures) -> tuple[float, int]:
    return (0.0 if figures.time is None else figures.time.seconds), figures.peak_bytes


def beside(config: RunConfig, node: int) -> Iterator[RunConfig]:
    """Yield the same mesh with another schedule, with overlap, with replicas that each fill a node, and with other ways
    to share rows, except for given options."""
    mesh, given = config.mesh, config.given
    tried: list[Mapping[str, Any]] = [{"stage": 0}] if config.parallel.zero_stage == 1 else []
    tried += tensor.whole_rows(config)
    if "overlap" not in given:
        tried.append({"overlap": "all"})
    if mesh.pp > 1 and "pipeline" not in given:
        chunks = [count for count in (2, 4) if config.model.layers % (mesh.pp * count) == 0]
        tried += [{"pipeline": "interleaved", "virtual_stages": count} for count in chunks]
        tried += [{"pipeline": kind, "virtual_stages": None} for kind in ("zb-h1", "zb-v")]
    tried += [*context.other_ways(config), *experts.other_cuts(config)]
    if config.data.micro_batch == 1 and recompute_of(config) != "none":
        yield from accepted(candidate(cut, recompute="none") for cut in wider(config))
    shards = max(1, node // (mesh.cp * mesh.tp))
    if config.parallel.zero_stage == 3 and mesh.dp_replicate == 1 and shards > 1 and mesh.axes.dp_shard % shards == 0:
        tried.append({"dp_replicate": mesh.axes.dp_shard // shards})
    yield from (changed for changed in accepted(candidate(config, **values) for values in tried) if changed != config)


def least_seconds(cluster: Cluster) -> Callable[[RunConfig], float]:
    """Return a lower bound on the seconds of a configuration's step, by the clock.

    With any mesh, ZeRO stage and recipe, each microbatch goes through the forward of every unit and the products
    of its backward, and waits for tensor parallelism's collectives between them: t seconds, over all pipeline stages.
    Pipeline stage i of p takes t_i of them, and m t_i for m microbatches, and one microbatch must pass the stages
    before it, both ways: m t_i + (t_1 + ... + t_(i-1)). For every division of t this is, for some i, at least
    t / (1 - (1 - 1/m)^p), which is m t without a pipeline. An interleaved pipeline begins sooner: m t / p, and t; so
    does one with separate weight gradients, for m >= p. Blocks are alike: t is measured on a few blocks, and each
    further block adds as much.
    """

    @cache
    def kernels(config: RunConfig) -> float:
        every, start = period_of(config), first_period(config)  # one of that many blocks is recomputed
        if config.model.has_blocks and config.model.layers > (start + 1) * every:
            if (shorter := _of_layers(config, every, start)) is None:
                return 0.0
            one, two = map(kernels, shorter)
            return one + (config.model.layers // every - start) * (two - one)
        events, costs = plan(config, keep_events=True).events[0], costs_of(config, cluster)
        seconds = sum(costs.kernel(event) for event in events if isinstance(event, Kernel) and _in_all(event))
        if config.clock.tp_comm_overlap:
            return seconds
        return seconds + sum(
            costs.collective(event) for event in events if isinstance(event, Launch) and _blocks(event)
        )

    def bound(config: RunConfig) -> float:
        stages, batches = config.mesh.pp, config.data.accumulate
        if (one := _of_tp_alone(config)) is None:
            return 0.0
        if pipeline.begins_sooner(config):
            return kernels(one) * max(1.0, batches / stages)
        return kernels(one) / (1 - (1 - 1 / batches) ** stages)

    return bound


def _in_all(kernel: Kernel) -> bool:
    """Return whether a record has this kernel at every ZeRO stage and with every recipe. Sums, casts and copies of
    gradients differ."""
    of_backward = kernel.scope.phase == Phase.BACKWARD and kernel.engine == MATMUL
    return kernel.work is None and (kernel.scope.phase == Phase.FORWARD or of_backward)


def _blocks(launch: Launch) -> bool:
    """Return whether compute waits for a collective right after its launch."""
    return launch.axis in CUTS and launch.scope.phase in (Phase.FORWARD, Phase.BACKWARD)
