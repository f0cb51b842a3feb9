"""`zerosim plot`: a picture of what runs count, written as PNG or SVG, and its numbers as JSON.

A figure is a row of `FIGURES`. What is run for it is in `plot_run.py` (one run) and `plot_runs.py` (several); the
pictures are drawn in `report/plots/`. Most figures are of runs on shapes alone.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from zerosim.analysis.surfaces import SURFACES
from zerosim.cli.compare import optimizer_names
from zerosim.cli.options import add_run_flags
from zerosim.cli.outputs import as_json, human_stream, output, written
from zerosim.cli.parser import Parser, add_kinds, kind_parser, nearest, size, stages, whole_number
from zerosim.cli.plan import add_reserve_flag, add_time_flags
from zerosim.cli.plot_run import (
    Asked,
    Drawn,
    addresses,
    gradients,
    on_one_rank,
    planned,
    planned_exact,
    schedule,
    streams,
    timeline,
)
from zerosim.cli.plot_runs import (
    GPUS,
    RANKS,
    by_each,
    descent,
    memory,
    on_surfaces,
    optimizers,
    overlap,
    rank_numbers,
    scaling,
    throughput,
    traffic,
)
from zerosim.cli.streams import one_voice
from zerosim.config.option import known_word
from zerosim.errors import InputError, printable
from zerosim.ledger.memory import MARKS

EXAMPLE = "zerosim plot memory --model flat --params 7.5B --ranks 64 --precision fp16 --gpu v100-32 -o figure1.svg"
MOST_STEPS = 10_000


class Figure(NamedTuple):
    """A figure: what it shows, the names of its flags in FLAGS, what reads its run from them, and what draws it."""

    draw: Callable[[argparse.Namespace, Any, Any], Drawn]
    flags: str
    words: str
    needs: Callable[[argparse.Namespace], Asked] = planned_exact
    run_flags: Callable[[Parser], None] | None = partial(add_run_flags, planning=True)
    epilog: str | None = None


FIGURES = {
    "memory": Figure(memory, "limit gpu reserve stages mark",
        "bytes per rank by stage and kind: the ZeRO paper's Figure 1; of one stage with --pp, by pipeline stage"),
    "scaling": Figure(scaling, "limit gpu stages mark ranks-list",
        "bytes per rank against the number of ranks"),
    "timeline": Figure(timeline, "limit gpu rank-or-all step",
        "live bytes over one step, event by event (in seconds: streams)"),
    "traffic": Figure(traffic, "stages",
        "bytes sent per rank and step, by stage and operation"),
    "addresses": Figure(addresses, "allocator-limit allocator-gpu reserve rank step",
        "where each buffer lay in memory, and the holes between (with --allocator caching or arena)", planned),
    "streams": Figure(streams, "clock ranks-or-all time",
        "one step in time on a GPU: each rank's streams as lanes, waits, live bytes (with --gpu)"),
    "throughput": Figure(throughput, "clock-and-memory sizes gpus-list time reserve stages",
        "TFLOP/s per GPU by model size or number of GPUs, a line a stage, modelled (with --gpu)"),
    "overlap": Figure(overlap, "clock time stages",
        "a step's time by the bandwidth between GPUs, and where communication hides, by stage (with --gpu)"),
    "gradients": Figure(gradients, "",
        "a real run's gradients by size, against what fp16, bf16, e4m3 and e5m2 hold at each loss scale",
        on_one_rank, add_run_flags,
        "One rank trains in fp32 without ZeRO, so that the true size of each gradient is known. What backward\n"
        "leaves is counted in every step, before clipping: by power of two, and after a cast of scale times\n"
        "gradient to each format. After Figure 3 of Mixed Precision Training (arXiv 1710.03740)."),
    "descent": Figure(descent, "optimizers surface descent-steps",
        "paths of optimizers on surfaces of two weights: bowl, Rosenbrock, saddle, Beale",
        on_surfaces, None,
        "The optimizers are those that train, on a flat of two weights in fp32. Each has its own\n"
        "learning rate: of 1e-4, 2e-4, 5e-4, ..., 5 the one whose loss is lowest after the steps,\n"
        "among those whose path stays within the picture; of two that are even, the smaller."),
    "optimizers": Figure(optimizers, "optimizers",
        "a model trained by several optimizers: loss by step, bytes of state per parameter", by_each, add_run_flags),
    "schedule": Figure(schedule, "",
        "a pipeline's forwards and backwards in slots, and its bubble (with --pp)"),
}  # fmt: skip
WORDS = {name: row.words for name, row in FIGURES.items()}


# -- flags ------------------------------------------------------------------------------------------
def _flag(spelled: str, help: str, read: Callable[[str], Any] = str, default: Any = None, **more: Any) -> Any:
    """What adds a flag, spelled as in its help: '--limit --capacity SIZE'."""
    names = [word for word in spelled.split() if word.startswith("-")]
    metavar = spelled.split()[-1] if len(names) < len(spelled.split()) else None
    return lambda add: add(*names, metavar=metavar, help=help, type=read, default=default, **more)


def _from_0(text: str, or_else: str = "") -> int:
    value = whole_number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 0{or_else}")
    return value


def _from_0_or_all(text: str) -> int | str:
    return text if text == "all" else _from_0(text, ", or 'all'")


def _steps(text: str) -> int:
    steps = whole_number(text)
    if not 1 <= steps <= MOST_STEPS:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 to {MOST_STEPS:,} steps")
    return steps


def _surfaces(text: str) -> tuple[str, ...]:
    """'all', or one of them."""
    name = known_word(text, [*SURFACES, "all"])
    if name is None:
        known = nearest(text, [*SURFACES, "all"], "zerosim plot descent --help")
        raise argparse.ArgumentTypeError(f"unknown surface {text!r}{known}")
    return tuple(SURFACES) if name == "all" else (name,)


def _inches(text: str) -> tuple[float, float]:
    match = re.fullmatch(r"(\d+(?:\.\d*)?)[x×](\d+(?:\.\d*)?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected inches, width x height, such as 8x4.5")
    return float(match[1]), float(match[2])


_BOTTOM = "along the bottom: numbers of layers of --model's width, such as 8,16,32, or names of models"
FLAGS: Mapping[str, Callable[[Callable[..., Any]], Any]] = {
    "limit": _flag("--limit --capacity SIZE", "a line at so many bytes", size),
    "gpu": _flag("--gpu NAME", "a line at this device's memory, such as v100-32"),
    "allocator-limit": _flag("--limit --capacity SIZE", "the allocator has so many bytes", size),
    "allocator-gpu": _flag("--gpu NAME", "the allocator has this device's memory, such as v100-32"),
    "clock": _flag("--gpu NAME", "whose times: a preset, or a TOML file; or --node"),
    "clock-and-memory": _flag("--gpu NAME", "whose times and memory: a preset, or a TOML file; or --node"),
    "time": add_time_flags,
    "reserve": add_reserve_flag,
    "sizes": _flag("--sizes LIST", _BOTTOM),
    "gpus-list": _flag("--ranks-list 1,2,4,...", f"along the bottom: numbers of GPUs (default: {GPUS})", rank_numbers),
    "ranks-list": _flag("--ranks-list 1,2,4,...", f"numbers of ranks (default: {RANKS})", rank_numbers),
    "stages": _flag("--stages 0,1,2,3", "which ZeRO stages (default: 0,1,2,3)", stages),
    "mark": _flag("--mark", "when (default: end_of_backward)", str, "end_of_backward", choices=(*MARKS, "peak")),
    "rank": _flag("--rank R", "whose (default: 0)", _from_0, 0),
    "rank-or-all": _flag("--rank R|all", "whose events (default: 0)", _from_0_or_all, 0),
    "ranks-or-all": _flag("--rank R|all", "whose (default: all of one kind each)", _from_0_or_all, "all"),
    "step": _flag("--step S|all", "which step (default: 0)", _from_0_or_all, 0),
    "optimizers": _flag("--optimizers sgd,adam,...", "which, up to 8 (default: sgd,adam,lion)", optimizer_names,
        ("sgd", "adam", "lion")),
    "surface": _flag("--surface NAME", f"{', '.join(SURFACES)}, or all of them (default: all)", _surfaces,
        tuple(SURFACES)),
    "descent-steps": _flag("--steps S", "steps of each (default: 100)", _steps, 100),
}  # fmt: skip


def add_arguments(parser: Parser) -> None:
    add_kinds(parser, "figure", WORDS, width=11)
    parser.epilog = f"{parser.epilog}\n\nThe ZeRO paper's Figure 1: {EXAMPLE}"


def _add_flags(parser: Parser, figure: Figure) -> None:
    add = parser.add_argument_group("the picture").add_argument
    add("--out", "-o", metavar="FILE", help="where it goes: a name that ends in .png or .svg")
    add("--theme", choices=("light", "dark"), default="light", help="colours of the sheet (default: light)")
    add("--size", metavar="WxH", type=_inches, help="inches, such as 8x4.5 (default: the figure's)")
    for flag in figure.flags.split():
        FLAGS[flag](add)
    if figure.run_flags is not None:
        figure.run_flags(parser)
    parser.epilog = figure.epilog
    parser.set_defaults(limit=None)
    add = parser.add_argument_group("what it leaves").add_argument
    add("--json", metavar="OUT.json", help="the numbers that are drawn; - for stdout")
    add("--quiet", "-q", action="store_true", help="do not say what was written")


# -- the verb ---------------------------------------------------------------------------------------
def main(args: argparse.Namespace) -> int:
    name, parser = kind_parser("plot", "figure", WORDS, args.kind)
    _add_flags(parser, FIGURES[name])
    with parser.naming_as_typed(args.words):
        asked = parser.parse(args.words)
        return _plot(FIGURES[name], argparse.Namespace(**vars(asked), figure=name))


def _plot(figure: Figure, args: argparse.Namespace) -> int:
    """Read what is asked for, check the files, run, draw, and write the picture and its numbers."""
    config, limit, world = figure.needs(args)
    form, kernel = _form(args.out), ""
    about: dict[str, Any] = {"figure": args.figure}
    read = [] if config is None else [config]
    if config is not None:
        about["config"] = config.to_dict()
        if limit is not None and config.model.has_blocks:  # the device has decided it
            kernel = f", with {config.memory.attention} attention and recipe {config.parallel.recipe}"
    with one_voice(world) as is_first:
        picture = output(args, "out", *read) if is_first else None
        figures = output(args, "json", *read, apart=picture) if is_first else None
        with _no_backend():
            from zerosim.report.plots.page import check_size, write_figure
        if args.size is not None:
            check_size(args.size)
        drawn = figure.draw(args, config, limit)
        values = as_json(lambda: {"schema": 1, **about, **drawn.numbers})
        with written((picture, lambda file: write_figure(drawn.figure, file, form)), (figures, values)):
            pass  # what is said below is only true where nothing failed
        if not args.quiet:
            print(f"wrote {printable(args.out)}{kernel}{drawn.said}", file=human_stream(args))
    return drawn.code


def _form(out: str | None) -> str:
    """Raises: InputError for a name that does not say how a picture is written."""
    if out is None:
        raise InputError("--out: expected a file to draw into, such as -o memory.svg")
    form = out.rpartition(".")[2].lower()
    if form not in ("png", "svg"):
        raise InputError(f"--out {out}: expected a name that ends in .png or .svg")
    return form


@contextmanager
def _no_backend() -> Iterator[None]:
    """matplotlib is not to read MPLBACKEND: a picture goes into a file, and no window is named wrongly."""
    named = os.environ.pop("MPLBACKEND", None)
    try:
        yield
    finally:
        if named is not None:
            os.environ["MPLBACKEND"] = named
