"""The runs of `zerosim plot`'s figures of several runs, and their numbers: by ZeRO stage, size, bandwidth, optimizer.

`report/plots/` draws the pictures.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zerosim.cli.compare import trained
from zerosim.cli.options import training_config
from zerosim.cli.parser import whole_number
from zerosim.cli.plan import planned_config
from zerosim.cli.plot_run import Asked, Drawn, clock_of, stages_asked
from zerosim.config import OPTIONS, RunConfig
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import InputError, OutOfMemory

if TYPE_CHECKING:
    from zerosim.report.verdict import Limit
    from zerosim.train.result import RunResult

RANKS = "1,4,16,64,256,1024"
GPUS = "1,2,4,8,16,32,64"


def memory(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> Drawn:
    from zerosim.report.plots import memory_figure
    from zerosim.report.plots.by_stage import memory_bars

    results, mark = _by_stage(args, config), args.mark
    # A flat model serves the papers' figures, which show model states alone.
    line, reserve = limit and limit.line, None if limit is None or config.model.family == "flat" else limit.reserve
    figure = memory_figure(results, limit=line, mark=mark, reserve=reserve)
    bars = [bar.to_dict() for bar in memory_bars(results, mark, reserve)]
    return Drawn(figure, {"mark": mark, "limit": limit and limit.to_dict(), "bars": bars})


def traffic(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> Drawn:
    from zerosim.report.plots import traffic_figure
    from zerosim.report.plots.by_stage import traffic_bars, traffic_formulas

    results = _by_stage(args, config)
    figure = traffic_figure(results)
    bars, formulas = traffic_bars(results), traffic_formulas(results)
    return Drawn(figure, {"bars": [bar.to_dict() for bar in bars], "formulas": [line.to_dict() for line in formulas]})


def scaling(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> Drawn:
    from zerosim.report.plots import scaling_figure
    from zerosim.report.plots.by_stage import memory_bars
    from zerosim.report.plots.words import run_words

    mark = args.mark
    lines: dict[str, list[tuple[int, int]]] = {}
    shown: dict[str, RunResult] = {}
    for asked in _by_ranks(args, config, RANKS):
        results, ranks = _by_stage(args, asked), asked.mesh.ranks
        shown |= {f"{label} {ranks}": result for label, result in results.items()}
        for bar in memory_bars(results, mark):
            lines.setdefault(bar.label.split(" (")[0], []).append((ranks, bar.total_bytes))
    line = limit and limit.line
    figure = scaling_figure(lines, limit=line, mark=mark, subtitle=run_words(shown))
    return Drawn(figure, {"mark": mark, "limit": limit and limit.to_dict(), "lines": lines})


def throughput(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> Drawn:
    """Draw TFLOP/s per GPU, by size or by number of GPUs. Every point is a plan."""
    from zerosim.analysis.capabilities import notes_of
    from zerosim.analysis.step_interval import step_interval
    from zerosim.report.interval import trust
    from zerosim.report.plots import throughput_figure
    from zerosim.report.plots.throughput import Point
    from zerosim.report.plots.words import run_words, stage_label
    from zerosim.report.time import step_values
    from zerosim.report.verdict import fits, peak_bytes
    from zerosim.train.plan import plan

    cluster, along = clock_of(args, limit), "ranks" if args.sizes is None else "parameters"
    assert limit is not None  # as for --gpu
    points: dict[str, list[dict[str, Any]]] = {}
    shown, intervals = {}, []
    for asked in _sizes(args, config):
        for stage in stages_asked(args, config):
            result = plan(asked.at_stage(stage).replace(steps=None), cluster=cluster)
            values = result.time and step_values(result.config, result.time, cluster)
            if not values:
                raise InputError(
                    f"--model {asked.model.name}: it computes no matrix products and has no TFLOP/s; choose another "
                    "--model"
                )
            assert result.time is not None
            intervals.append(step_interval(result.config, result.time, cluster))
            point = {"ranks": asked.mesh.ranks, "model": asked.model.name, "parameters": result.num_parameters}
            point |= {"layers": asked.model.layers, "peak_bytes": peak_bytes(result), "fits": fits(result, limit)}
            label = stage_label(stage).split(" (")[0]
            points.setdefault(label, []).append({**point, "time": values})
            shown[f"{label} {point[along]}"] = result
    lines = {
        label: [
            Point(point[along], point["time"]["model_tflops"], point["fits"], _band(point["time"])) for point in each
        ]
        for label, each in points.items()
    }
    lengths = {result.config.model.seq for result in shown.values()}
    rows = f"{config.data.micro_batch} x {config.data.accumulate} rows"
    rows += (
        f" of {config.model.seq:,} tokens on a data rank"
        if len(lengths) == 1
        else " on a data rank, each model's own length"
    )
    subtitle = ", ".join([run_words(shown), rows, *notes_of(config, "assumed"), f"on {cluster.name}"])
    figure = throughput_figure(lines, along, subtitle=subtitle, trust=trust(cluster, *intervals))
    return Drawn(figure, {"along": along, "limit": limit.to_dict(), "lines": points})


def _band(time: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return TFLOP/s at the ends of a step's interval."""
    if time["step_s_low"] is None:
        return None
    work: float = time["model_tflops"] * time["step_s"]
    return work / time["step_s_high"], work / time["step_s_low"]


def overlap(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> Drawn:
    """Draw a step's time by bandwidth, one line per ZeRO stage."""
    from zerosim.analysis.break_even import hides_from, link_of, record_step, times_by_bandwidth
    from zerosim.analysis.step_interval import step_interval
    from zerosim.report.interval import band, trust
    from zerosim.report.names import STAGES
    from zerosim.report.plots import overlap_figure
    from zerosim.report.plots.overlap import Line

    cluster = clock_of(args, limit)
    link = link_of(config.mesh.ranks, cluster)
    own = getattr(cluster, link)
    speeds = [own * 2 ** (power / 2) for power in range(-12, 9)]
    lines, intervals = {}, []
    for stage in stages_asked(args, config):
        asked = config.at_stage(stage)
        step = record_step(asked, cluster)
        times = times_by_bandwidth(step, cluster, speeds)
        bands = [band(asked, time, cluster) for time in times]
        intervals += [step_interval(asked, time, cluster) for time in times]
        lines[STAGES[stage]] = Line(times, hides_from(step, cluster), bands)
    trusted = trust(cluster, *intervals)
    figure = overlap_figure(lines, speeds, link, config, cluster, trust=trusted)
    numbers = {"modelled_on": cluster.name, "link": link, "own_bytes_per_s": own, "bytes_per_s": speeds}
    numbers |= {"stages": {name: line.to_dict() for name, line in lines.items()}}
    return Drawn(figure, numbers)


def _by_stage(args: argparse.Namespace, config: RunConfig) -> dict[str, RunResult]:
    """Return a plan for each requested ZeRO stage, by the stage's name."""
    from zerosim.report.plots.words import stage_label
    from zerosim.train.plan import plan

    steps = getattr(args, "steps", None)  # a scenario's algorithms are for learning: all of them count the same
    return {
        stage_label(stage): plan(config.at_stage(stage).replace(steps=steps)) for stage in stages_asked(args, config)
    }


def _by_ranks(args: argparse.Namespace, config: RunConfig, usual: str) -> Iterator[RunConfig]:
    """Return the run on each number of ranks in --ranks-list. Without it take the usual numbers that the mesh divides
    or, if it divides none, the same multiples of the mesh."""
    each, numbers = config.mesh.others.world_size, rank_numbers(usual)
    most = OPTIONS["ranks"].high or each
    fitting = [ranks for ranks in numbers if ranks % each == 0] or [n * each for n in numbers if n * each <= most]
    for ranks in args.ranks_list or fitting:
        yield config.replace(ranks=ranks)


def _sizes(args: argparse.Namespace, config: RunConfig) -> Iterator[RunConfig]:
    """Return the configurations along the x axis: numbers of ranks, numbers of layers, or models.

    Raises: InputError for both lists, and for a size that the mesh does not divide.
    """
    if args.sizes is None:
        yield from _by_ranks(args, config, GPUS)
        return
    if args.ranks_list is not None:
        raise InputError("--sizes and --ranks-list are both given: choose one")
    for word in args.sizes.split(","):
        name = word.strip()
        if name.isdecimal():
            yield config.replace(layers=int(name))
        else:
            named = argparse.Namespace(**{**vars(args), "model": name})
            yield planned_config(named).replace(capacity=None)


def rank_numbers(text: str) -> tuple[int, ...]:
    """Parse '1,2,4': whole numbers of ranks, each once, rising."""
    numbers = {whole_number(word.strip()) for word in text.split(",")}
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of ranks of at least 1")
    return tuple(sorted(numbers))


# -- optimizers -------------------------------------------------------------------------------------
def on_surfaces(args: argparse.Namespace) -> Asked:
    """Check the request; this figure has no run. Raises: InputError for optimizers that cannot be shown on surfaces of
    two weights."""
    from zerosim.analysis.descent import check_shows

    for name in args.optimizers:
        check_shows(name)
    return Asked(None)


def by_each(args: argparse.Namespace) -> Asked:
    """Build the run for every optimizer. Raises: InputError as `training_config` does, and for one optimizer too
    many."""
    if hasattr(args, "optimizer"):
        raise InputError(f"--optimizer {args.optimizer} and --optimizers are both given: choose one")
    config = training_config(args)
    return Asked(config, world=config.world.transport)


def descent(args: argparse.Namespace, config: None, limit: None) -> Drawn:
    from zerosim.analysis.descent import best_paths
    from zerosim.report.plots import descent_figure

    _check_count(args.optimizers)
    paths = best_paths(args.surface, args.optimizers, args.steps)
    figure = descent_figure(paths)
    values = {name: {title: path.to_dict() for title, path in of.items()} for name, of in paths.items()}
    return Drawn(figure, {"steps": args.steps, "paths": values})


def optimizers(args: argparse.Namespace, base: RunConfig, limit: None) -> Drawn:
    from zerosim.report.compare import Comparison
    from zerosim.report.plots import optimizers_figure

    _check_count(args.optimizers)
    outcomes: dict[str, RunResult | OutOfMemory] = {}
    for name in args.optimizers:
        try:
            outcomes[name] = trained(OPTIMIZERS[name].title, base.replace(optimizer=name), args, None)
        except OutOfMemory as error:
            outcomes[name] = error
    page = Comparison("optimizer", outcomes)
    if not page.results:
        raise next(iter(page.failures.values()))
    failed = [f"{OPTIMIZERS[name].title}: {error}." for name, error in page.failures.items()]
    results = {OPTIMIZERS[name].title: result for name, result in page.results.items()}
    figure = optimizers_figure(results, notes=failed)
    code = OutOfMemory.exit_code if failed else 0
    return Drawn(figure, {"runs": page.to_dict()["columns"]}, code=code)


def _check_count(names: tuple[str, ...]) -> None:
    from zerosim.report.plots.style import LINE_PAINTS

    most = len(LINE_PAINTS)  # colours that can be told apart
    if len(names) > most:
        raise InputError(f"--optimizers: {len(names)} are more than the {most} that one picture holds: leave some out")
