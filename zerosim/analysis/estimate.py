"""Bounds and estimates of a configuration's step, from plans of a few blocks: what a search asks before a whole plan.

Blocks are alike, so each further block adds as much as the one before. The stages of a pipeline are alike too: one is
planned alone, on its own ranks, and the schedule's bubble is added (`pipeline.bubble`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from zerosim.analysis.candidate import accepted, candidate
from zerosim.analysis.capabilities import experts, offload, paging, pipeline, zero
from zerosim.analysis.facts import frozen_of
from zerosim.analysis.meshes import arranged
from zerosim.analysis.recompute import differ, first_period, period_of
from zerosim.analysis.weights import sizes
from zerosim.comm.runtime import make_backend
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.device.device import Device, Kind, Phase
from zerosim.device.events import Kernel, Launch
from zerosim.device.work import MATMUL
from zerosim.dtypes import dtype
from zerosim.errors import InputError
from zerosim.ledger.costs_of import costs_of
from zerosim.placement.mesh import CUTS
from zerosim.train.build_model import build_model
from zerosim.train.check_model import check_model
from zerosim.train.check_trained import is_of_experts
from zerosim.train.plan import Figures, plan

IN_FLIGHT = 2
"""Blocks beside the one at work of which ZeRO-2 and 3 hold something whole: the next one's parameters, the last one's
gradient. From then on each further block adds as much."""
ROWS = 16
"""Rows of the plans that bounds come from: more per microbatch save little time."""
Estimate = tuple[float, int]
"""Seconds and peak bytes; 0 for what is unknown."""


class Bounds:
    """Lower bounds on a configuration's seconds and bytes, from plans of a few blocks on tp's and cp's ranks alone."""

    def __init__(self, config: RunConfig, cluster: Cluster | None) -> None:
        self._cluster = cluster
        self._model = build_model(config, Device(0, make_backend("meta")))
        shapes = {name: math.prod(shape) for name, shape in self._model.shapes().items()}
        self._stacks = sum(numel for name, numel in shapes.items() if is_of_experts(config.model, name))
        self._ran: dict[RunConfig, tuple[float, int]] = {}
        self._alone: dict[RunConfig, tuple[float, float]] = {}

    @property
    def numel(self) -> int:
        """The model's parameters."""
        return self._model.num_parameters

    def seconds(self, asked: RunConfig) -> float:
        """Return a lower bound on the seconds of a step, by the clock; 0 without one.

        With any mesh, ZeRO stage and recipe, each microbatch goes through the forward of every unit and the products
        of its backward, and waits for tensor parallelism's collectives between them: t seconds, over all pipeline
        stages. Pipeline stage i of p takes t_i of them, and m t_i for m microbatches, and one microbatch must pass the
        stages before it, both ways: m t_i + (t_1 + ... + t_(i-1)). For every division of t this is, for some i, at
        least t / (1 - (1 - 1/m)^p), which is m t without a pipeline. An interleaved pipeline begins sooner: m t / p,
        and t; so does one with separate weight gradients, for m >= p. Blocks are alike: t is measured on a few blocks,
        and each further block adds as much. So are rows, but kernels of many rows take least for each. Nor is a step
        shorter than ZeRO-3's gathers between nodes.
        """
        if self._cluster is None:
            return 0.0
        stages, batches, (kernels, _) = asked.mesh.pp, asked.data.accumulate, self._of_rows(asked)
        if pipeline.begins_sooner(asked):
            return max(kernels * max(1.0, batches / stages), self._gathers(asked, self._cluster))
        return max(kernels / (1 - (1 - 1 / batches) ** stages), self._gathers(asked, self._cluster))

    def _gathers(self, asked: RunConfig, cluster: Cluster) -> float:
        """Return the seconds in which ZeRO-3's two gathers of a microbatch cross the NICs of a node, all of whose rings
        share them; 0 where the shards of a model lie in one node."""
        mesh, numel = asked.mesh.axes, self._model.num_parameters - self._stacks
        if asked.parallel.zero_stage < 3 or mesh.shards * mesh.tp <= cluster.node_gpus:
            return 0.0
        sent = dtype(asked.precision.stored).itemsize * numel * (mesh.shards - 1) / mesh.shards
        return asked.data.accumulate * 2 * sent / mesh.pp / cluster.nic

    def nbytes(self, asked: RunConfig) -> float:
        """Return a lower bound on the device bytes of the fullest rank: where all parameters are trained, an even share
        of them, of Adam's moments and masters and of permanent gradient buffers; and on the first pipeline stage,
        before its first backward, the saved activations of its live microbatches."""
        mesh, stage, precision, held = asked.mesh.axes, asked.parallel.zero_stage, asked.precision, 0.0
        if frozen_of(asked) is None:
            dense, stacks = self._model.num_parameters - self._stacks, self._stacks
            has_params, has_states = (offload.is_here(asked, what) for what in ("params", "optimizer"))
            whole, cut = (dense / mesh.tp + stacks / (mesh.ep * mesh.etp)), (dense + stacks) / (mesh.shards * mesh.tp)
            held = has_params * dtype(precision.stored).itemsize * (cut if stage == 3 else whole)
            if asked.optim.optimizer in ("adam", "adamw") and has_states and not paging.is_on(asked):
                held += (8 + 4 * precision.has_masters) * (cut if stage else whole)
            if zero.keeps_gradients(asked):
                held += dtype(precision.grad_dtype).itemsize * (cut if stage > 1 else whole)
        return held / mesh.pp + pipeline.live_layers(asked) * self._of_rows(asked)[1]

    def _of_rows(self, asked: RunConfig) -> tuple[float, float]:
        """Return the seconds of a microbatch of so many rows on tp's and cp's ranks alone, and the bytes that one block
        saves of it; 0 for what is unknown."""
        if asked not in self._alone:
            one, rows = _of_tp_alone(asked), asked.data.micro_batch
            found = (0.0, 0.0) if one is None else self._of_model(one)
            self._alone[asked] = found[0] * rows / max(ROWS, rows), found[1] * rows / max(ROWS, rows)
        return self._alone[asked]

    def _of_model(self, one: RunConfig) -> tuple[float, float]:
        """Return the seconds of a microbatch, and the bytes that one block saves of it; 0 for what is unknown."""
        every, start = period_of(one), first_period(one)  # one of that many blocks is recomputed
        layers = sum(pipeline.layers_by_stage(one)) if one.model.has_blocks else 0
        if layers <= (start + 1) * every or differ(one):
            return self._of(one)[0], 0.0
        if (shorter := _of_layers(one, every, start)) is None:
            return 0.0, 0.0
        (first, few), (second, more) = map(self._of, shorter)
        return first + (layers // every - start) * (second - first), (more - few) / every

    def _of(self, few: RunConfig) -> tuple[float, int]:
        """Return the seconds of a plan's kernels and of collectives that compute waits for, and what it saves."""
        if few not in self._ran:
            result, seconds = plan(few, keep_events=True), 0.0
            if self._cluster is not None:
                costs, waits = costs_of(few, self._cluster), not few.clock.tp_comm_overlap
                for event in result.events[0]:
                    if isinstance(event, Kernel) and _in_all(event):
                        seconds += costs.kernel(event)
                    elif waits and isinstance(event, Launch) and _blocks(event):
                        seconds += costs.collective(event)
            held = result.memory[0].marks["end_of_forward"].by_kind
            self._ran[few] = seconds, held.get(Kind.ACTIVATION, 0) + held.get(Kind.KEPT, 0)
        return self._ran[few]


def estimates(
    unlimited: Callable[[RunConfig], Figures], block_numel: int, *, has_clock: bool
) -> Callable[[RunConfig], Estimate]:
    """Return an estimate of a step's seconds and bytes, which remembers the plans it made. The bytes of a pipeline are
    not estimated where seconds are: its first stage refuses a whole plan soon. `block_numel`: parameters of a block."""
    unlimited = cache(unlimited)

    def seconds(config: RunConfig) -> float:
        figures = unlimited(config)
        return 0.0 if figures.time is None else figures.time.seconds

    def straight(config: RunConfig) -> Estimate:
        (chunks, less), layers = pipeline.layer_steps(config), sum(pipeline.layers_by_stage(config))
        few, start = chunks * period_of(config), first_period(config)
        start += -(-zero.most_gathered(config) // (block_numel * few))  # fewer stay gathered (DeepSpeed)
        start += -(-IN_FLIGHT // few) if config.parallel.zero_stage >= 2 else 0
        shorter = None if layers <= (start + 2) * few or less else _of_layers(config, few, start)
        if shorter is None:
            return seconds(config), unlimited(config).peak_bytes
        (first, least), (second, more) = ((seconds(one), unlimited(one).peak_bytes) for one in shorter)
        times = layers / few - start
        return first + times * (second - first), round(least + times * (more - least))

    @cache
    def of_stage(alone: RunConfig) -> tuple[float, float, float, float] | None:
        """Return the seconds of one pipeline stage on its own ranks: once a step and once a microbatch, without blocks
        and for each block."""
        every, start = period_of(alone), first_period(alone)
        if (shorter := _of_layers(alone, every, start)) is None:
            return None
        once_and_twice = [list(accepted(candidate(few, accumulate=times) for few in shorter)) for times in (1, 2)]
        if any(len(ones) < len(shorter) for ones in once_and_twice):
            return None
        one, two = (list(map(seconds, ones)) for ones in once_and_twice)
        each = [more - less for less, more in zip(one, two, strict=True)]
        once = [less - more for less, more in zip(one, each, strict=True)]
        slope = (once[1] - once[0]) / every, (each[1] - each[0]) / every
        return once[0] - start * every * slope[0], slope[0], each[0] - start * every * slope[1], slope[1]

    def piped(config: RunConfig) -> Estimate:
        mesh, times, chunks = config.mesh.axes, config.data.accumulate, config.chunks
        if (alone := _of_one_stage(config)) is None or (found := of_stage(alone)) is None:
            return straight(config)
        ends_once, once, ends, each = found
        layers = pipeline.layers_by_stage(config)
        work = [each * count for count in layers]
        work[chunks.stage(chunks.last)] += ends
        idle = float(pipeline.bubble(config).at(sizes(config))) * times * sum(work) / mesh.pp
        return times * max(work) + idle + ends_once / 2 + once * max(layers), 0

    return cache(lambda config: piped(config) if has_clock and config.mesh.pp > 1 else straight(config))


def _of_one_stage(config: RunConfig) -> RunConfig | None:
    """Return a model on the ranks of one pipeline stage, with as many rows per microbatch."""
    mesh = config.mesh
    return arranged(config, mesh.ranks // mesh.pp, mesh.tp, 1, config.parallel.zero_stage, accumulate=1)


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
    """Return a microbatch of at least `ROWS` rows on a mesh of tp and cp alone, on a device without a limit: it has the
    kernels and saves of every mesh with these. None if other options do not go with it."""
    tp, rows = config.mesh.tp, max(ROWS, config.data.micro_batch)
    alone = {"micro_batch": rows, "accumulate": 1, "steps": 1, "ranks_per_node": 0, **experts.alone(config, tp)}
    return arranged(config, tp * config.mesh.cp, tp, 1, 0, **alone, allocator="exact", allocator_conf=None)


def _in_all(kernel: Kernel) -> bool:
    """Return whether a record has this kernel at every ZeRO stage and with every recipe. Sums, casts and copies of
    gradients differ."""
    of_backward = kernel.scope.phase == Phase.BACKWARD and kernel.engine == MATMUL
    return kernel.work is None and (kernel.scope.phase == Phase.FORWARD or of_backward)


def _blocks(launch: Launch) -> bool:
    """Return whether compute waits for a collective right after its launch."""
    return launch.axis in CUTS and launch.scope.phase in (Phase.FORWARD, Phase.BACKWARD)
