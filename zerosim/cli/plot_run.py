"""The runs of `zerosim plot`'s figures of one run, and their numbers: a step's memory and time, microbatches,
gradients, operands in 8 bits.

`report/plots/` draws the pictures. Figures of several runs are in `plot_runs.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from zerosim.cli.options import training_config
from zerosim.cli.outputs import human_stream
from zerosim.cli.parser import flag_of
from zerosim.cli.plan import device_cluster, device_limit, planned_config
from zerosim.config import RunConfig
from zerosim.config.parts.allocators import is_exact, with_addresses
from zerosim.config.presets.cluster import Cluster
from zerosim.errors import InputError, wrong

if TYPE_CHECKING:
    from zerosim.report.verdict import Limit
    from zerosim.train.result import RunResult

MOST_SLOTS = 20_000
Found = TypeVar("Found")


class Asked(NamedTuple):
    """The request of the flags: the run, if any, the device's memory, and the world of a training run."""

    config: RunConfig | None
    limit: Limit | None = None
    world: str = "threads"


class Drawn(NamedTuple):
    """A `Chart` or an animation, its numbers, the text beside them, and the exit code."""

    figure: Any
    numbers: dict[str, Any]
    said: str = ""
    code: int = 0


# -- plans ------------------------------------------------------------------------------------------
def planned(args: argparse.Namespace) -> Asked:
    """Build the run for a figure of plans. A capacity becomes a line: a ZeRO stage that does not fit is drawn beyond
    it, not refused.

    Raises: InputError as `planned_config` does, for flags that exclude one another, and for too large a plan.
    """
    is_of_several = hasattr(args, "ranks_list")
    if is_of_several and hasattr(args, "ranks") and getattr(args, "sizes", None) is None:
        why = f"{args.figure} runs several numbers of ranks: pass --ranks-list instead"
        raise InputError(f"--ranks {args.ranks}: {why}")
    for one, other in (("limit", "gpu"), ("stages", "stage")):
        if getattr(args, one, None) is not None and getattr(args, other, None) is not None:
            raise InputError(f"{flag_of(one)} and {flag_of(other)} are both given: choose one")
    config = planned_config(args, any_ranks=is_of_several)
    limit = device_limit(args, config.memory.capacity) if hasattr(args, "gpu") else None
    config = config.replace(capacity=None)
    from zerosim.train.plan import check_plan_of

    if hasattr(args, "stages"):  # build every stage before the first run: some cost much less than others
        for stage in stages_asked(args, config):
            check_plan_of(config.at_stage(stage).replace(steps=getattr(args, "steps", None)))
    return Asked(config, limit)


def planned_exact(args: argparse.Namespace) -> Asked:
    """Build `planned`, without a scenario's allocator. Raises: InputError for an allocator among the flags too."""
    asked = planned(args)
    if hasattr(args, "allocator"):
        why = f"works only with plot addresses; {args.figure} draws live bytes under any allocator"
        raise InputError(f"--allocator {args.allocator}: {why}")
    return asked._replace(config=asked.config and asked.config.replace(allocator="exact", allocator_conf=None))


def stages_asked(args: argparse.Namespace, config: RunConfig) -> tuple[int, ...]:
    """Return the requested ZeRO stages, or all."""
    return args.stages or ((config.parallel.zero_stage,) if hasattr(args, "stage") else (0, 1, 2, 3))


def clock_of(args: argparse.Namespace, limit: Limit | None) -> Cluster:
    """Return the devices of --gpu or --node; one of them is required. Raises: InputError without."""
    cluster = device_cluster(args, limit)
    if cluster is None:
        raise InputError("no device to time: pass --gpu NAME or --node NAME")
    return cluster


def _step_of(args: argparse.Namespace, config: RunConfig) -> int | None:
    """Return --step as a number; None for all. Raises: InputError for a step that the run does not have."""
    if args.step == "all":
        return None
    steps, step = config.optim.steps or 1, int(args.step)
    if step >= steps:
        raise InputError(f"--step {step}: expected 0 to {steps - 1}, or more --steps")
    return step


def _recorded(config: RunConfig, step: int | None) -> RunResult:
    """Return the plan with its events, up to that step or of all steps."""
    from zerosim.train.plan import plan

    steps = config.optim.steps or 1 if step is None else step + 1
    return plan(config.replace(steps=steps), keep_events=True)


def timeline(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> Drawn:
    from zerosim.report.plots import timeline_figure
    from zerosim.report.plots.history import read_history
    from zerosim.report.plots.timeline import MOST_PANELS
    from zerosim.report.plots.words import run_words, stage_label

    rank, num_ranks = args.rank, config.mesh.ranks
    ranks = range(num_ranks) if rank == "all" else [rank]
    if ranks[-1] >= num_ranks:
        raise InputError(f"--rank {rank}: expected 0 to {num_ranks - 1}, for there are {num_ranks} ranks")
    if len(ranks) > MOST_PANELS:
        raise InputError(f"--rank all: {len(ranks)} ranks are more than the {MOST_PANELS} that one picture holds")
    step, line = _step_of(args, config), limit and limit.line
    result = _recorded(config, step)
    histories = [result.events[rank] for rank in ranks]
    subtitle = f"{stage_label(config.parallel.zero_stage).split(' (')[0]}, {run_words({'': result})}"
    figure = timeline_figure(histories, ranks, step, limit=line, subtitle=subtitle)
    drawn = [read_history(events, step).to_dict() for events in histories]
    panels = [{"rank": rank, **numbers} for rank, numbers in zip(ranks, drawn, strict=True)]
    return Drawn(figure, {"step": step, "limit": limit and limit.to_dict(), "panels": panels})


def addresses(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> Drawn:
    from zerosim.device.allocators.choose import make_allocator
    from zerosim.device.memory import Exact
    from zerosim.report.export.extents import read_addresses
    from zerosim.report.names import STAGES
    from zerosim.report.plots import addresses_figure
    from zerosim.report.plots.words import run_words

    rank, (name, conf) = args.rank, with_addresses(config.memory)
    if rank >= config.mesh.ranks:
        raise InputError(f"--rank {rank}: expected 0 to {config.mesh.ranks - 1}")
    step = _step_of(args, config)
    capacity = None if limit is None else max(1, limit.nbytes - limit.reserve(config))
    if is_exact(config.memory):
        raise InputError("--allocator exact: counts bytes and has no addresses; choose caching or arena")
    allocator = make_allocator(name, capacity, conf)
    assert not isinstance(allocator, Exact)  # it was refused
    result = _recorded(config.replace(allocator="exact", allocator_conf=None), step)
    placed = read_addresses(result.events[rank], allocator, step)
    knobs = f", {conf}" if conf else ""
    subtitle = f"{STAGES[config.parallel.zero_stage]}, {run_words({'': result})}{knobs}"
    figure = addresses_figure(placed, name, rank=rank, step=step, subtitle=subtitle)
    return Drawn(figure, {"rank": rank, "step": step, "limit": limit and limit.to_dict(), **placed.to_dict()})


def streams(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> Drawn:
    """Draw a step's streams."""
    from zerosim.analysis.step_interval import step_interval
    from zerosim.ledger.clock import step_time
    from zerosim.report.interval import trust
    from zerosim.report.plots import streams_figure
    from zerosim.report.plots.streams import MOST_RANKS
    from zerosim.report.plots.words import run_words
    from zerosim.report.time import track_values
    from zerosim.train.delayed import timed_step
    from zerosim.train.plan import plan_first_step, timeline_of

    cluster, result = clock_of(args, limit), plan_first_step(config)
    track_of = timeline_of(result, cluster)
    ranks = sorted(track_of.tracks)[:MOST_RANKS] if args.rank == "all" else [args.rank]
    found = step_interval(config, step_time(track_of, result.stands_for), cluster)
    subtitle = f"{run_words({'': result})}, on {cluster.name}. {trust(cluster, found)}"
    step = timed_step(result.config)
    figure = streams_figure(track_of, ranks, events=result.events[ranks[0]], step=step, subtitle=subtitle)
    return Drawn(figure, {"step_s": track_of.seconds, "ranks": [track_values(track_of.tracks[rank]) for rank in ranks]})


def schedule(args: argparse.Namespace, config: RunConfig, limit: None) -> Drawn:
    from zerosim.analysis.formulas import bubble
    from zerosim.analysis.slots import Slot, counted_bubble, counted_own_span, slots_of
    from zerosim.parallel.pipeline import schedule_of
    from zerosim.report.plots import schedule_figure

    pp, chunks, batches = config.mesh.pp, config.chunks.each, config.data.accumulate
    kind = config.parallel.pipeline_schedule
    if pp == 1:
        raise InputError("plot schedule: without pp there is no pipeline to draw; pass --pp 2 or more")
    num_slots = 2 * pp * batches * chunks
    if num_slots > MOST_SLOTS:
        most = max(1, MOST_SLOTS // (2 * pp * chunks))
        what = f"{num_slots:,} forwards and backwards, one picture holds at most {MOST_SLOTS:,}"
        raise wrong("accumulate", f" {batches}: {what}; choose {most} or fewer, or fewer stages")

    def values(slot: Slot) -> dict[str, Any]:
        what = {"what": slot.action.name, "micro_batch": slot.action.slot, "chunk": slot.action.chunk}
        return {**what, "start": slot.start, "stop": slot.stop}

    order = schedule_of(config.parallel)
    slots = slots_of([order(pp, stage, batches, chunks) for stage in range(pp)], config.chunks)
    shares = {"counted": counted_bubble(slots), "formula": bubble(kind).at(p=pp, m=batches, v=chunks)}
    shares["own_span"] = counted_own_span(slots)
    figure = schedule_figure(slots, kind)
    stages = [[values(slot) for slot in own] for own in slots]
    bubbles = {name: str(share) for name, share in shares.items()}
    return Drawn(figure, {"schedule": kind, "bubble": bubbles, "stages": stages})


# -- a real run -------------------------------------------------------------------------------------
def _trained(args: argparse.Namespace, config: RunConfig, work: Callable[..., Found], words: str = "") -> Found:
    """Train by `work`, and say how far it is."""
    from zerosim.report.progress import progress_on
    from zerosim.train.run import DEFAULT_STEPS

    steps = config.optim.steps or (None if config.data.tokens else DEFAULT_STEPS)
    with progress_on(human_stream(args), config.mesh.ranks, steps, words, quiet=args.quiet) as progress:
        return work(config, progress=progress)


def trained(args: argparse.Namespace, config: RunConfig) -> RunResult:
    """Train, and say how far it is."""
    from zerosim.train.run import run

    return _trained(args, config, run)


def on_one_rank(args: argparse.Namespace) -> Asked:
    """Build the run whose gradients or operands are counted. Raises: InputError for flags that counting fixes."""
    from zerosim.train import gradients, operands

    counted = gradients if args.figure == "gradients" else operands
    for name, value in counted.FIXED.items():
        if getattr(args, name, value) != value:
            always = f"{args.figure} are counted with {flag_of(name)} {value}"
            why = "every loss scale is tried" if value is None else always
            raise InputError(f"{flag_of(name)} {getattr(args, name)}: {why}; leave it out")
    return Asked(counted.on_one_rank(training_config(args)))


def gradients(args: argparse.Namespace, config: RunConfig, limit: None) -> Drawn:
    from zerosim.report.plots import gradients_figure
    from zerosim.train.gradients import FORMATS, count_gradients

    found = _trained(args, config, count_gradients, "fp32")
    psi = f"Ψ = {found.num // max(found.steps, 1):,} parameters"
    subtitle = f"{config.model.name} of {psi} on one rank, fp32 with {config.optim.optimizer}"
    figure = gradients_figure(found, subtitle=subtitle)
    lost = [(name, found.share(name, 0)) for name in FORMATS]
    said = ", ".join(f"{name} {share['to_zero'] + share['overflowed']:.2%}" for name, share in lost)
    return Drawn(figure, found.to_dict(), f"; lost without a loss scale: {said}")


def operands(args: argparse.Namespace, config: RunConfig, limit: None) -> Drawn:
    """Count the fates of a run's operands in 8 bits, and draw them."""
    from zerosim.config.parts.fp8 import SCALINGS
    from zerosim.report.plots import operands_figure
    from zerosim.report.plots.operands import CALLED, FATES
    from zerosim.report.plots.words import percent
    from zerosim.train.operands import FORMATS, OPERANDS, count_operands

    found = _trained(args, config, count_operands, "operands")
    subtitle = f"{config.model.name} on one rank, {config.precision.stored} with {config.optim.optimizer}"
    figure = operands_figure(found, subtitle=subtitle)

    lines = list[str]()
    for operand in OPERANDS:
        heads = "".join(f"{words:>14}" for words in ("keeps digits", *(words for words, _ in FATES.values())))
        lines += ["", f"{CALLED[operand]:<16}{heads}"]
        for form, scaling in product(FORMATS, SCALINGS):
            share = found.share(operand, scaling, form)
            lost = "".join(f"{percent(share[what]) + ' %':>14}" for what in FATES)
            lines.append(f"{form} {scaling:<11}{100 * share['full']:>12.3f} %{lost}")
    return Drawn(figure, found.to_dict(), "\n".join(lines))
