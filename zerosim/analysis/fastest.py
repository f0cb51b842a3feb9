"""The fastest ways to train on a number of ranks: meshes, ZeRO stages, micro-batches and recompute, by the clock.

Every candidate has the same global batch. What is ranked was run on shapes: memory beside the reserve, then the time.
What spares runs by its time cannot cost a result:

- Of one mesh, stage and micro-batch the least recompute that fits is the fastest. More of it adds kernels and
  collectives to the same record and takes none away, and in the clock nothing ends sooner for what is added (each start
  is the latest of what it waits for). Over micro-batches this does not hold: a larger one with more recompute may win.
- No step ends before its own kernels could have, had they nothing to wait for (`least_seconds`). Candidates are run
  in the order of that bound, until it is beyond what has been found.

What spares runs by its memory takes for granted, as every search does (`search.py`), that more rows, more micro-batches
and less recompute never take less of it:

- A mesh and stage on which not even one micro-batch of one row with the most recompute fits is given up at once. That
  takes a tenth of a second where the model states alone are too much, and no clock.
- Where some rows do not fit, no more are tried with the same recompute, but for all of them at once, which need no sums
  of gradients.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from zerosim.analysis.meshes import arranged, cuts, mesh_values, powers
from zerosim.analysis.search import ever_more_recompute
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.device.device import Phase
from zerosim.device.events import Kernel
from zerosim.device.work import MATMUL
from zerosim.ledger.clock import StepTime
from zerosim.ledger.costs_of import costs_of
from zerosim.placement.mesh import Mesh
from zerosim.train.plan import Figures, plan

MOST = 10


@dataclass(frozen=True, slots=True)
class Timed:
    """A configuration that fits: the most that a rank takes from its device, and how long its step takes."""

    config: RunConfig
    peak_bytes: int
    time: StepTime

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, without the time."""
        rows = {name: getattr(self.config.data, name) for name in ("micro_batch", "accumulate")}
        return {**mesh_values(self.config), **rows, "peak_bytes": self.peak_bytes}


@dataclass(frozen=True, slots=True)
class Fastest:
    """What was found, the fastest first; how many meshes, stages and micro-batches there are, how many configurations
    were run, and how many of these did not fit. `ended`: False where it was interrupted: there may be faster ones."""

    found: Sequence[Timed]
    candidates: int
    tried: int
    too_much: int
    ended: bool = True


TimedTrial = Callable[[RunConfig], Figures | None]
"""What a step takes; None where it does not fit."""
Room = Callable[[RunConfig], bool]
"""Whether a step fits, whatever its time."""


def fastest(
    config: RunConfig,
    global_batch: int,
    trial: TimedTrial,
    bound: Callable[[RunConfig], float],
    room: Room,
    say: Callable[[RunConfig, Figures | None], None] = lambda config, figures: None,
    most: int = MOST,
) -> Fastest:
    """The best on `config`'s ranks, with so many rows in a step. `bound` is `least_seconds` on their cluster; what has
    no `room` fails its `trial`.

    Raises: KeyboardInterrupt while nothing has been found. Later it ends the search with what there is.
    """
    families = list(ladders(config, global_batch))
    waiting = [(bound(family[0]), number, 0) for number, family in enumerate(families)]
    heapq.heapify(waiting)
    found: list[Timed] = []
    fitting: list[bool] = []
    has_room: dict[RunConfig, bool] = {}
    refused: dict[RunConfig, int] = {}  # by `_one_row`: the fewest rows of those that do not fit

    def fits(asked: RunConfig) -> bool:
        rows, one = asked.data.micro_batch, _one_row(asked)
        if asked.data.accumulate > 1 and rows >= refused.get(one, rows + 1):
            return False
        figures = trial(asked)
        say(asked, figures)
        fitting.append(figures is not None)
        if figures is None and asked.data.accumulate > 1:
            refused[one] = rows
        if figures is not None and figures.time is not None:
            found.append(Timed(asked, figures.peak_bytes, figures.time))
            found.sort(key=lambda one: (one.time.seconds, one.peak_bytes))
            del found[most:]
        return figures is not None

    def search() -> None:
        while waiting:
            least, number, more = heapq.heappop(waiting)
            if len(found) == most and least >= found[-1].time.seconds:
                break
            family = families[number]
            smallest = _one_row(family[-1])
            if not has_room.get(smallest, True) or fits(family[more]):
                continue
            if smallest not in has_room:  # asked once something did not fit
                has_room[smallest] = room(smallest)
            if has_room[smallest] and more + 1 < len(family):
                heapq.heappush(waiting, (bound(family[more + 1]), number, more + 1))

    ended = False
    try:
        search()
        ended = True
    except KeyboardInterrupt:
        if not found:
            raise
    ran = [*fitting, *has_room.values()]
    return Fastest(found, len(families), len(ran), ran.count(False), ended)


def _one_row(asked: RunConfig) -> RunConfig:
    """The same with one row at a time, as few times as the schedule allows: nothing with more of them takes less."""
    return asked.replace(micro_batch=1, accumulate=asked.parallel.fewest_micro_batches(asked.mesh.pp))


def ladders(config: RunConfig, global_batch: int) -> Iterator[Sequence[RunConfig]]:
    """For every mesh, with and without sequence parallelism, ZeRO stage and micro-batch that the model and the batch
    can be cut for: ever more recompute."""
    ranks = config.mesh.ranks
    for tp, pp, stage in cuts(ranks):
        own, uneven = divmod(global_batch * Mesh(tp=tp, pp=pp).world_size, ranks)
        micro_batches = [] if uneven else [rows for rows in powers(own) if own % rows == 0]
        for rows, by_rows in product(micro_batches, (False, True) if tp > 1 else (False,)):
            sizes = {"micro_batch": rows, "accumulate": own // rows, "sequence_parallel": by_rows}
            asked = arranged(config, ranks, tp, pp, stage, **sizes)
            if asked is not None:
                yield [asked.replace(recompute=recompute) for recompute in ever_more_recompute(config)]


def least_seconds(cluster: Cluster) -> Callable[[RunConfig], float]:
    """How long a configuration's step takes at least, by the clock.

    Whatever the mesh, stage and recipe are, each micro-batch goes through the forward of every unit and the products
    of its backward: t seconds of kernels, over all pipeline stages. Stage i of p takes t_i of them, and m t_i for m
    micro-batches, while one of them has to come through the stages before it, both ways: m t_i + (t_1 + ... + t_(i-1)).
    However t is divided, for one i that is at least t / (1 - (1 - 1/m)^p), which is m t without a pipeline. An
    interleaved one begins sooner: m t / p, and t; so does one whose weight gradients run apart, for m >= p. Blocks are
    alike: t is that of a few, and as much more for each of the others.
    """

    @cache
    def kernels(config: RunConfig) -> float:
        every = max(1, config.memory.again.every)  # of so many blocks one runs again
        if config.model.has_blocks and config.model.layers > 2 * every:
            one, two = (kernels(config.replace(layers=count * every)) for count in (1, 2))
            return one + (config.model.layers // every - 1) * (two - one)
        events = plan(config, keep_events=True).events[0]
        costs = costs_of(config, cluster)
        return sum(costs.kernel(event) for event in events if isinstance(event, Kernel) and _in_all(event))

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
