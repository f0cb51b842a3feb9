"""`zerosim plot`'s figures that are in seconds: what is run for them, and their numbers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from zerosim.cli.plan import device_cluster
from zerosim.config import OPTIONS, RunConfig
from zerosim.errors import InputError

if TYPE_CHECKING:
    from zerosim.report.verdict import Limit

GPUS = "1,2,4,8,16,32,64"


def streams(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> tuple[Any, dict[str, Any]]:
    """A step's lanes."""
    from zerosim.report.plots import streams_figure
    from zerosim.report.plots.streams import MOST_RANKS
    from zerosim.report.plots.words import run_words
    from zerosim.report.time import track_values
    from zerosim.train.plan import plan_first_step, timeline_of

    cluster = device_cluster(args, limit)
    assert cluster is not None  # --gpu is required
    result = plan_first_step(config)
    timeline = timeline_of(result, cluster)
    ranks = sorted(timeline.tracks)[:MOST_RANKS] if args.rank == "all" else [args.rank]
    subtitle = f"{run_words({'': result})}, on {cluster.name}, modelled; known error: {cluster.known_error}"
    figure = streams_figure(timeline, ranks, subtitle=subtitle, theme=args.theme, size=args.size)
    return figure, {"step_s": timeline.seconds, "ranks": [track_values(timeline.tracks[rank]) for rank in ranks]}


def throughput(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> tuple[Any, dict[str, Any]]:
    """TFLOP/s of a GPU, by size or by number of GPUs: every point is a plan."""
    from zerosim.report.plots import throughput_figure
    from zerosim.report.plots.throughput import Point
    from zerosim.report.plots.words import run_words, stage_label
    from zerosim.report.time import step_values
    from zerosim.report.verdict import fits, peak_bytes
    from zerosim.train.plan import plan

    cluster = device_cluster(args, limit)
    assert limit is not None  # --gpu is required
    assert cluster is not None
    stages = stages_asked(args, config)
    lines: dict[str, list[Point]] = {}
    numbers: dict[str, list[dict[str, Any]]] = {}
    shown = {}
    along = "ranks" if args.sizes is None else "parameters"
    for asked in _sizes(args, config):
        for stage in stages:
            result = plan(asked.at_stage(stage).replace(steps=None), cluster=cluster)
            values = result.time and step_values(result.config, result.time, cluster)
            if not values:
                raise InputError(f"--model {asked.model.name}: it multiplies nothing, and has no TFLOP/s")
            label, fitting = stage_label(stage).split(" (")[0], fits(result, limit)
            x = asked.mesh.ranks if along == "ranks" else result.num_parameters
            lines.setdefault(label, []).append(Point(x, values["model_tflops"], fitting))
            point = {"ranks": asked.mesh.ranks, "model": asked.model.name, "parameters": result.num_parameters}
            point |= {"layers": asked.model.layers, "peak_bytes": peak_bytes(result), "fits": fitting, "time": values}
            numbers.setdefault(label, []).append(point)
            shown[f"{label} {x}"] = result
    data = config.data
    rows = f"{data.micro_batch} x {data.accumulate} rows of {config.model.seq:,} tokens on a data rank"
    if len({result.config.model.seq for result in shown.values()}) > 1:
        rows = f"{data.micro_batch} x {data.accumulate} rows on a data rank, each model's own length"
    subtitle = f"{run_words(shown)}, {rows}, recompute {config.memory.recompute}, on {cluster.name}"
    figure = throughput_figure(
        lines, along, subtitle=subtitle, known_error=cluster.known_error, theme=args.theme, size=args.size
    )
    return figure, {"along": along, "limit": limit.to_dict(), "lines": numbers}


def _sizes(args: argparse.Namespace, config: RunConfig) -> Iterator[RunConfig]:
    """The configurations along the bottom: numbers of ranks, numbers of layers, or models.

    Raises: InputError for both lists, and for a size that the mesh does not cut.
    """
    if args.sizes is not None and args.ranks_list is not None:
        raise InputError("--sizes and --ranks-list are both given: choose one")
    if args.sizes is None:
        for ranks in args.ranks_list or usual_ranks(config, [int(word) for word in GPUS.split(",")]):
            yield config.replace(ranks=ranks)
        return
    for word in args.sizes.split(","):
        name = word.strip()
        if name.isdecimal():
            yield config.replace(layers=int(name))
        else:
            from zerosim.cli.plan import planned_config

            yield planned_config(argparse.Namespace(**{**vars(args), "model": name})).replace(capacity=None)


def usual_ranks(config: RunConfig, usual: Sequence[int]) -> list[int]:
    """The usual numbers of ranks that the mesh divides; where it divides none, as many times the mesh."""
    each = config.mesh.others.world_size
    most = OPTIONS["ranks"].high or each
    return [ranks for ranks in usual if ranks % each == 0] or [n * each for n in usual if n * each <= most]


def overlap(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> tuple[Any, dict[str, Any]]:
    """A step's time by bandwidth: a line a stage."""
    from zerosim.analysis.break_even import hides_from, link_of, record_step, times_by_bandwidth
    from zerosim.report.names import STAGES
    from zerosim.report.plots import overlap_figure
    from zerosim.report.plots.overlap import Line

    cluster = device_cluster(args, limit)
    assert cluster is not None  # --gpu is required
    link = link_of(config.mesh.ranks, cluster)
    own = getattr(cluster, link)
    speeds = [own * 2 ** (power / 2) for power in range(-12, 9)]
    lines = {}
    for stage in stages_asked(args, config):
        step = record_step(config.at_stage(stage), cluster)
        lines[STAGES[stage]] = Line(times_by_bandwidth(step, cluster, speeds), hides_from(step, cluster))
    figure = overlap_figure(lines, speeds, link, config, cluster, theme=args.theme, size=args.size)
    return figure, {
        "modelled_on": cluster.name,
        "link": link,
        "own_bytes_per_s": own,
        "bytes_per_s": speeds,
        "stages": {name: line.to_dict() for name, line in lines.items()},
        "known_error": cluster.known_error,
    }


def stages_asked(args: argparse.Namespace, config: RunConfig) -> tuple[int, ...]:
    """Those that were asked for, or all."""
    return args.stages or ((config.parallel.zero_stage,) if hasattr(args, "stage") else (0, 1, 2, 3))
