"""`zerosim plot`: a picture of what runs on shapes alone count, written as PNG or SVG.

Which figure takes which flags, what is run for it, and its numbers as JSON. The pictures are drawn in `report/plots/`.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zerosim.cli.options import add_run_flags
from zerosim.cli.outputs import as_json, human_stream, output, written
from zerosim.cli.parser import Parser, flag_of, nearest, size, stages, whole_number
from zerosim.cli.plan import add_reserve_flag, add_time_flags, device_limit, planned_config
from zerosim.cli.plot_time import GPUS, overlap, stages_asked, streams, throughput
from zerosim.config import RunConfig
from zerosim.errors import InputError, printable
from zerosim.ledger.memory import MARKS

if TYPE_CHECKING:
    from zerosim.report.verdict import Limit
    from zerosim.train.result import RunResult

EXAMPLE = "zerosim plot memory --model flat --params 7.5B --ranks 64 --precision fp16 --gpu v100-32 -o figure1.svg"
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
    "schedule": "a pipeline's forwards and backwards in slots, and its bubble (with --pp)",
}
Drawn = tuple[Any, dict[str, Any]]  # matplotlib's Figure, and its numbers


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
    add = parser.add_argument_group("the picture").add_argument
    add("--out", "-o", metavar="FILE", help="where it goes: a name that ends in .png or .svg")
    add("--theme", choices=("light", "dark"), default="light", help="colours of the sheet (default: light)")
    add("--size", metavar="WxH", type=_inches, help="inches, such as 8x4.5 (default: the figure's)")
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
    group = parser.add_argument_group("what it leaves")
    group.add_argument("--json", metavar="OUT.json", help="the numbers that are drawn; - for stdout")
    group.add_argument("--quiet", "-q", action="store_true", help="do not say what was written")
    return parser


def main(args: argparse.Namespace) -> int:
    name, args = args.figure, _figure_parser(args.figure).parse(args.words)
    if hasattr(args, "ranks_list") and hasattr(args, "ranks") and getattr(args, "sizes", None) is None:
        raise InputError(f"--ranks {args.ranks}: {name} runs several numbers of ranks: give them with --ranks-list")
    for one, other in (("limit", "gpu"), ("stages", "stage")):
        if getattr(args, one, None) is not None and getattr(args, other, None) is not None:
            raise InputError(f"{flag_of(one)} and {flag_of(other)} are both given: choose one")
    config = planned_config(args, any_ranks=name in ("scaling", "throughput"))
    form = (args.out or "").rpartition(".")[2].lower()
    if args.out is None:
        raise InputError("--out: expected a file to draw into, such as -o memory.svg")
    if form not in ("png", "svg"):
        raise InputError(f"--out {args.out}: expected a name that ends in .png or .svg")
    picture = output(args, "out", config)
    figures = output(args, "json", config, apart=picture)
    limit = device_limit(args, config.memory.capacity) if hasattr(args, "gpu") else None
    config = config.replace(capacity=None)  # a stage that does not fit is drawn beyond the line, not refused
    if name != "addresses":
        if hasattr(args, "allocator"):
            raise InputError(f"--allocator {args.allocator}: of plot addresses; {name} draws what is live in any case")
        config = config.replace(allocator="exact", allocator_conf=None)  # a scenario's
    with _no_backend():
        from zerosim.report.plots.page import check_size, write_figure

    if args.size is not None:
        check_size(args.size)
    figure, numbers = _DRAW[name](args, config, limit)
    values = {"schema": 1, "figure": name, "config": config.to_dict(), **numbers}
    with written((picture, lambda file: write_figure(figure, file, form)), (figures, as_json(lambda: values))):
        pass  # what is said below is only true where nothing failed
    if not args.quiet:
        decided = limit is not None and limit.device is not None and config.model.has_blocks
        kernel = f", with {config.memory.attention} attention" if decided else ""
        print(f"wrote {printable(args.out)}{kernel}", file=human_stream(args))
    return 0


@contextmanager
def _no_backend() -> Iterator[None]:
    """matplotlib is not to read MPLBACKEND: a picture goes into a file, and no window is named wrongly."""
    named = os.environ.pop("MPLBACKEND", None)
    try:
        yield
    finally:
        if named is not None:
            os.environ["MPLBACKEND"] = named


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
    each = config.mesh.dp_replicate * config.mesh.tp * config.mesh.pp
    for ranks in args.ranks_list or [count for count in _numbers(RANKS) if count % each == 0]:
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
    from zerosim.analysis.slots import counted_bubble, slots_of
    from zerosim.parallel.pipeline import SCHEDULES
    from zerosim.parallel.schedule import Forward
    from zerosim.report.plots import schedule_figure

    mesh, kind, chunks = config.mesh, config.parallel.pipeline_schedule, config.parallel.num_chunks
    if mesh.pp == 1:
        raise InputError("plot schedule: without pp there is one stage, and nothing to draw; pass --pp 2 or more")
    order, batches = SCHEDULES[kind], config.data.accumulate
    slots = slots_of([order(mesh.pp, stage, batches, chunks) for stage in range(mesh.pp)])
    rows = [
        [
            {
                "what": "forward" if isinstance(slot.action, Forward) else "backward",
                "micro_batch": slot.action.slot,
                "chunk": slot.action.chunk,
                "start": slot.start,
                "stop": slot.stop,
            }
            for slot in own
        ]
        for own in slots
    ]
    share = {"counted": str(counted_bubble(slots)), "formula": str(bubble(mesh.pp, config.data.accumulate, chunks))}
    figure = schedule_figure(slots, kind, theme=args.theme, size=args.size)
    return figure, {"schedule": kind, "bubble": share, "stages": rows}


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


def _inches(text: str) -> tuple[float, float]:
    match = re.fullmatch(r"(\d+(?:\.\d*)?)[x×](\d+(?:\.\d*)?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected inches, width x height, such as 8x4.5")
    return float(match[1]), float(match[2])


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
