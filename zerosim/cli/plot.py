"""`zerosim plot`: a picture of what runs count, written as PNG or SVG; most are of runs on shapes alone.

Which figure takes which flags, what is run for it, and its numbers as JSON. The pictures are drawn in `report/plots/`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zerosim.cli.options import add_run_flags
from zerosim.cli.parser import Parser, flag_of, nearest, size, stages, whole_number
from zerosim.cli.plan import add_reserve_flag, add_time_flags, device_limit, planned_config
from zerosim.cli.plot_file import Drawn, add_output_flags, add_picture_flags, check_sheet, figure_files, leave
from zerosim.cli.plot_gradients import add_gradient_flags, gradients
from zerosim.cli.plot_optimizers import add_descent_flags, add_training_flags, descent, optimizers
from zerosim.cli.plot_time import GPUS, overlap, stages_asked, streams, throughput, usual_ranks
from zerosim.config import RunConfig
from zerosim.config.option import known_word
from zerosim.errors import InputError, wrong
from zerosim.ledger.memory import MARKS

if TYPE_CHECKING:
    from zerosim.report.verdict import Limit
    from zerosim.train.result import RunResult

EXAMPLE = "zerosim plot memory --model flat --params 7.5B --ranks 64 --precision fp16 --gpu v100-32 -o figure1.svg"
MOST_SLOTS = 20_000
RANKS = "1,4,16,64,256,1024"
FIGURES = {
    "memory": "bytes per rank by stage and kind: the ZeRO paper's Figure 1; of one stage with --pp, by pipeline stage",
    "scaling": "bytes per rank against the number of ranks",
    "timeline": "live bytes over one step, event by event (in seconds: streams)",
    "traffic": "bytes sent per rank and step, by stage and operation",
    "addresses": "where each buffer lay in memory, and the holes between (with --allocator caching or arena)",
    "streams": "one step in time on a GPU: each rank's streams as lanes, waits, live bytes (with --gpu)",
    "throughput": "TFLOP/s per GPU by model size or number of GPUs, a line a stage, modelled (with --gpu)",
    "overlap": "a step's time by the bandwidth between GPUs, and where communication hides, by stage (with --gpu)",
    "gradients": "a real run's gradients by size, against what fp16, bf16, e4m3 and e5m2 hold at each loss scale",
    "descent": "paths of optimizers on surfaces of two weights: bowl, Rosenbrock, saddle, Beale",
    "optimizers": "a model trained by several optimizers: loss by step, bytes of state per parameter",
    "schedule": "a pipeline's forwards and backwards in slots, and its bubble (with --pp)",
}


def add_arguments(parser: Parser) -> None:
    known = "\n".join(f"  {name:10} {text}" for name, text in FIGURES.items())
    parser.epilog = (
        f"figures:\n{known}\n\n  zerosim plot FIGURE --help   its flags, those of a run among them\n\n"
        f"The ZeRO paper's Figure 1: {EXAMPLE}"
    )
    parser.add_argument("figure", metavar="FIGURE", nargs="?", help=", ".join(FIGURES))
    parser.add_argument("words", metavar="...", nargs=argparse.REMAINDER, help="its flags")


def _figure_parser(name: str | None) -> Parser:
    """The grammar of one figure, with the flags that it has a use for."""
    if name is None:
        raise InputError(f"expected a figure: one of {', '.join(FIGURES)}")
    if name not in FIGURES:
        raise InputError(f"unknown figure {name!r}{nearest(name, FIGURES, 'zerosim plot --help')}")
    parser = Parser(f"zerosim plot {name}", FIGURES[name][0].upper() + FIGURES[name][1:] + ".")
    add = add_picture_flags(parser)
    if name == "descent":
        add_descent_flags(parser, add)
    elif name == "optimizers":
        add_training_flags(parser, add)
    elif name == "gradients":
        add_gradient_flags(parser)
    else:
        _add_plan_flags(name, parser, add)
    add_output_flags(parser)
    return parser


def _add_plan_flags(name: str, parser: Parser, add: Callable[..., Any]) -> None:
    """Those of a figure of plans."""
    if name == "streams":
        add("--gpu", metavar="NAME", required=True, help="whose times: a preset, or a TOML file")
        add("--rank", metavar="R|all", type=_number_or_all, default="all", help="whose (default: all of one kind each)")
    if name == "overlap":
        add("--gpu", metavar="NAME", required=True, help="whose times: a preset, or a TOML file")
    if name in ("overlap", "streams"):
        add_time_flags(add)
        parser.set_defaults(limit=None)
    elif name == "throughput":
        add("--gpu", metavar="NAME", required=True, help="whose times and memory: a preset, or a TOML file")
        words = "along the bottom: numbers of layers of --model's width, such as 8,16,32, or names of models"
        add("--sizes", metavar="LIST", help=words)
        help = f"along the bottom: numbers of GPUs (default: {GPUS})"
        add("--ranks-list", metavar="1,2,4,...", type=_numbers, help=help)
        add_time_flags(add)
        parser.set_defaults(limit=None)
    elif name not in ("traffic", "schedule"):
        what = "the allocator has" if name == "addresses" else "a line at"
        add("--limit", "--capacity", metavar="SIZE", type=size, help=f"{what} so many bytes")
        add("--gpu", metavar="NAME", help=f"{what} this device's memory, such as v100-32")
    if name in ("addresses", "memory", "throughput"):
        add_reserve_flag(add)
    if name not in ("addresses", "timeline", "schedule", "streams"):
        add("--stages", metavar="0,1,2,3", type=stages, help="which ZeRO stages (default: 0,1,2,3)")
    if name in ("memory", "scaling"):
        add("--mark", choices=(*MARKS, "peak"), default="end_of_backward", help="when (default: end_of_backward)")
    if name == "scaling":
        add("--ranks-list", metavar="1,2,4,...", type=_numbers, help=f"numbers of ranks (default: {RANKS})")
    if name == "timeline":
        add("--rank", metavar="R|all", type=_number_or_all, default=0, help="whose events (default: 0)")
        add("--step", metavar="S|all", type=_number_or_all, default=0, help="which step (default: 0)")
    if name == "addresses":
        add("--rank", metavar="R", type=_rank, default=0, help="whose (default: 0)")
        add("--step", metavar="S|all", type=_number_or_all, default=0, help="which step (default: 0)")
    add_run_flags(parser, planning=True)


def main(args: argparse.Namespace) -> int:
    name, words = known_word(args.figure or "", FIGURES) or args.figure, args.words
    parser = _figure_parser(name)
    with parser.naming_as_typed(words):
        return _plot(name, parser.parse(words))


def _plot(name: str, args: argparse.Namespace) -> int:
    if name in _TRAINED:
        return _TRAINED[name](args)
    if hasattr(args, "ranks_list") and hasattr(args, "ranks") and getattr(args, "sizes", None) is None:
        raise InputError(f"--ranks {args.ranks}: {name} runs several numbers of ranks: give them with --ranks-list")
    for one, other in (("limit", "gpu"), ("stages", "stage")):
        if getattr(args, one, None) is not None and getattr(args, other, None) is not None:
            raise InputError(f"{flag_of(one)} and {flag_of(other)} are both given: choose one")
    config = planned_config(args, any_ranks=name in ("scaling", "throughput"))
    files = figure_files(args, config)
    limit = device_limit(args, config.memory.capacity) if hasattr(args, "gpu") else None
    config = config.replace(capacity=None)  # a stage that does not fit is drawn beyond the line, not refused
    if name != "addresses":
        if hasattr(args, "allocator"):
            raise InputError(f"--allocator {args.allocator}: of plot addresses; {name} draws what is live in any case")
        config = config.replace(allocator="exact", allocator_conf=None)  # a scenario's
    check_sheet(args)
    from zerosim.train.plan import check_plan_of

    if hasattr(args, "stages"):  # every stage before the first is run: some cost much less than others
        for stage in stages_asked(args, config):
            check_plan_of(config.at_stage(stage).replace(steps=getattr(args, "steps", 1)))
    decided = limit is not None and limit.device is not None and config.model.has_blocks
    kernel = f", with {config.memory.attention} attention" if decided else ""
    leave(args, files, _DRAW[name](args, config, limit), {"figure": name, "config": config.to_dict()}, kernel)
    return 0


def _memory(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> Drawn:
    from zerosim.report.plots import memory_figure
    from zerosim.report.plots.by_stage import memory_bars

    results, mark = _by_stage(args, config), args.mark
    # A flat model is there for the papers' figures, which show model states alone.
    line, reserve = limit and limit.line, None if limit is None or config.model.family == "flat" else limit.reserve
    figure = memory_figure(results, limit=line, mark=mark, theme=args.theme, size=args.size, reserve=reserve)
    bars = [bar.to_dict() for bar in memory_bars(results, mark, reserve)]
    return figure, {"mark": mark, "limit": limit and limit.to_dict(), "bars": bars}


def _traffic(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> Drawn:
    from zerosim.report.plots import traffic_figure
    from zerosim.report.plots.by_stage import traffic_bars, traffic_formulas

    results = _by_stage(args, config)
    figure = traffic_figure(results, theme=args.theme, size=args.size)
    return figure, {
        "bars": [bar.to_dict() for bar in traffic_bars(results)],
        "formulas": [line.to_dict() for line in traffic_formulas(results)],
    }


def _scaling(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> Drawn:
    from zerosim.report.plots import scaling_figure
    from zerosim.report.plots.by_stage import memory_bars
    from zerosim.report.plots.words import run_words

    mark = args.mark
    lines: dict[str, list[tuple[int, int]]] = {}
    shown: dict[str, RunResult] = {}
    for ranks in args.ranks_list or usual_ranks(config, _numbers(RANKS)):
        results = _by_stage(args, config.replace(ranks=ranks))
        shown = {**shown, **{f"{label} {ranks}": result for label, result in results.items()}}
        for bar in memory_bars(results, mark):
            lines.setdefault(bar.label.split(" (")[0], []).append((ranks, bar.total_bytes))
    line = limit and limit.line
    figure = scaling_figure(lines, limit=line, mark=mark, subtitle=run_words(shown), theme=args.theme, size=args.size)
    return figure, {"mark": mark, "limit": limit and limit.to_dict(), "lines": lines}


def _timeline(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> Drawn:
    from zerosim.report.plots import timeline_figure
    from zerosim.report.plots.history import read_history
    from zerosim.report.plots.timeline import MOST_PANELS
    from zerosim.report.plots.words import run_words, stage_label
    from zerosim.train.plan import plan

    rank, step = args.rank, None if args.step == "all" else args.step
    ranks = range(config.mesh.ranks) if rank == "all" else [rank]
    if ranks[-1] >= config.mesh.ranks:
        raise InputError(
            f"--rank {rank}: expected 0 to {config.mesh.ranks - 1}, for there are {config.mesh.ranks} ranks"
        )
    if len(ranks) > MOST_PANELS:
        raise InputError(f"--rank all: {len(ranks)} ranks are more than the {MOST_PANELS} that one picture holds")
    steps = config.optim.steps or 1
    if step is not None and step >= steps:
        raise InputError(f"--step {step}: expected 0 to {steps - 1}, or more --steps")
    result = plan(config.replace(steps=steps if step is None else step + 1), keep_events=True)
    histories = [result.events[rank] for rank in ranks]
    subtitle = f"{stage_label(config.parallel.zero_stage).split(' (')[0]}, {run_words({'': result})}"
    line = limit and limit.line
    figure = timeline_figure(histories, ranks, step, limit=line, subtitle=subtitle, theme=args.theme, size=args.size)
    drawn = [read_history(events, step).to_dict() for events in histories]
    panels = [{"rank": rank, **numbers} for rank, numbers in zip(ranks, drawn, strict=True)]
    return figure, {"step": step, "limit": limit and limit.to_dict(), "panels": panels}


def _addresses(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> Drawn:
    from zerosim.device.allocators.choose import make_allocator
    from zerosim.device.memory import Exact
    from zerosim.report.extents import read_addresses
    from zerosim.report.names import STAGES
    from zerosim.report.plots import addresses_figure
    from zerosim.report.plots.words import run_words
    from zerosim.train.plan import plan

    rank, memory, steps = args.rank, config.memory, config.optim.steps or 1
    step = None if args.step == "all" else args.step
    if rank >= config.mesh.ranks:
        raise InputError(f"--rank {rank}: expected 0 to {config.mesh.ranks - 1}")
    if step is not None and step >= steps:
        raise InputError(f"--step {step}: expected 0 to {steps - 1}, or more --steps")
    capacity = None if limit is None else max(1, limit.nbytes - limit.reserve(config))
    allocator = make_allocator(memory.allocator, capacity, memory.allocator_conf)
    if isinstance(allocator, Exact):
        raise InputError("--allocator exact: it counts bytes and has no addresses; choose caching or arena")
    exact = config.replace(allocator="exact", allocator_conf=None, steps=steps if step is None else step + 1)
    result = plan(exact, keep_events=True)
    addresses = read_addresses(result.events[rank], allocator, step)
    knobs = f", {memory.allocator_conf}" if memory.allocator_conf else ""
    subtitle = f"{STAGES[config.parallel.zero_stage]}, {run_words({'': result})}{knobs}"
    figure = addresses_figure(
        addresses, memory.allocator, rank=rank, step=step, subtitle=subtitle, theme=args.theme, size=args.size
    )
    return figure, {"rank": rank, "step": step, "limit": limit and limit.to_dict(), **addresses.to_dict()}


def _schedule(args: argparse.Namespace, config: RunConfig, limit: Limit | None) -> Drawn:
    from zerosim.analysis.formulas import bubble
    from zerosim.analysis.slots import counted_bubble, counted_own_span, slots_of
    from zerosim.parallel.pipeline import SCHEDULES
    from zerosim.report.plots import schedule_figure

    mesh, kind, chunks = config.mesh, config.parallel.pipeline_schedule, config.parallel.num_chunks
    if mesh.pp == 1:
        raise InputError("plot schedule: without pp there is one stage, and nothing to draw; pass --pp 2 or more")
    order, batches = SCHEDULES[kind], config.data.accumulate
    num_slots = 2 * mesh.pp * batches * chunks
    if num_slots > MOST_SLOTS:
        raise wrong(
            "accumulate",
            f" {batches}: {num_slots:,} forwards and backwards, one picture holds at most {MOST_SLOTS:,}; "
            f"choose {max(1, MOST_SLOTS // (2 * mesh.pp * chunks))} or fewer, or fewer stages",
        )
    slots = slots_of([order(mesh.pp, stage, batches, chunks) for stage in range(mesh.pp)], config.chunks)
    rows = [
        [
            {
                "what": slot.action.name,
                "micro_batch": slot.action.slot,
                "chunk": slot.action.chunk,
                "start": slot.start,
                "stop": slot.stop,
            }
            for slot in own
        ]
        for own in slots
    ]
    share = {
        "counted": str(counted_bubble(slots)),
        "formula": str(bubble(kind).at(p=mesh.pp, m=batches, v=chunks)),
        "own_span": str(counted_own_span(slots)),
    }
    figure = schedule_figure(slots, kind, theme=args.theme, size=args.size)
    return figure, {"schedule": kind, "bubble": share, "stages": rows}


_TRAINED = {"descent": descent, "gradients": gradients, "optimizers": optimizers}
_DRAW: dict[str, Callable[[argparse.Namespace, RunConfig, Limit | None], Drawn]] = {
    "addresses": _addresses,
    "memory": _memory,
    "overlap": overlap,
    "scaling": _scaling,
    "schedule": _schedule,
    "streams": streams,
    "throughput": throughput,
    "timeline": _timeline,
    "traffic": _traffic,
}


def _by_stage(args: argparse.Namespace, config: RunConfig) -> dict[str, RunResult]:
    """A plan for each stage that was asked for, by the stage's name."""
    from zerosim.report.plots.words import stage_label
    from zerosim.train.plan import plan

    steps = getattr(args, "steps", 1)  # a scenario's are there to learn: all of them count the same
    return {
        stage_label(stage): plan(config.at_stage(stage).replace(steps=steps)) for stage in stages_asked(args, config)
    }


def _numbers(text: str) -> tuple[int, ...]:
    """'1,2,4': whole numbers of ranks, each once, rising."""
    numbers = {whole_number(word.strip()) for word in text.split(",")}
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of ranks of at least 1")
    return tuple(sorted(numbers))


def _rank(text: str) -> int:
    value = whole_number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 0")
    return value


def _number_or_all(text: str) -> int | str:
    if text == "all":
        return text
    value = whole_number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 0, or 'all'")
    return value
