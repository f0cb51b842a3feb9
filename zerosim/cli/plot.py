"""`zerosim plot`: draw the counts of runs as PNG or SVG, and write their numbers as JSON.

A figure is a row of `FIGURES`. Its runs are in `plot_run.py` (one run), `plot_runs.py` (several) and
`plot_slides.py`. `report/plots/` and `report/moving/` draw the pictures. Most show runs on shapes alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from zerosim.cli.options import add_run_flags
from zerosim.cli.outputs import as_json, human_stream, made_folder, output, written
from zerosim.cli.parser import Parser, add_kinds, kind_parser
from zerosim.cli.pictures import form_of, no_backend
from zerosim.cli.plot_experts import experts, routed
from zerosim.cli.plot_flags import FLAGS, inches
from zerosim.cli.plot_run import (
    Asked,
    Drawn,
    addresses,
    gradients,
    on_one_rank,
    operands,
    planned,
    planned_exact,
    schedule,
    stages_asked,
    streams,
    timeline,
)
from zerosim.cli.plot_runs import (
    by_each,
    descent,
    memory,
    on_surfaces,
    optimizers,
    overlap,
    scaling,
    throughput,
    traffic,
)
from zerosim.cli.plot_slides import add_ranks, check_moving, flow, of_set, ownership, ring, ring_of, staircase
from zerosim.cli.streams import one_voice
from zerosim.errors import InputError, printable
from zerosim.report.names import listed

EXAMPLE = "zerosim plot memory --model flat --params 7.5B --ranks 64 --precision fp16 --gpu v100-32 -o figure1.svg"


class Figure(NamedTuple):
    """A figure: its description, the names of its flags in FLAGS, its runner, and its drawing function."""

    draw: Callable[[argparse.Namespace, Any, Any], Drawn]
    flags: str
    words: str
    needs: Callable[[argparse.Namespace], Asked] = planned_exact
    run_flags: Callable[[Parser], None] | None = partial(add_run_flags, planning=True)
    epilog: str | None = None
    moves: bool = False


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
    "operands": Figure(operands, "",
        "a real run's inputs, weights and output gradients in e4m3 and e5m2: what is lost by each scaling of --fp8",
        on_one_rank, add_run_flags,
        "One rank trains without 8 bits. Before each product of a block's linear map its operands are cast as\n"
        "each scaling of --fp8 casts them (of torchao, or of te where that is the default), in both formats.\n"
        "Counted are the numbers that keep all digits, lose digits, become 0, and saturate."),
    "descent": Figure(descent, "optimizers surface descent-steps",
        "paths of optimizers on surfaces of two weights: bowl, Rosenbrock, saddle, Beale",
        on_surfaces, None,
        "The optimizers are those that train, on a flat of two weights in fp32. Each has its own\n"
        "learning rate: out of 1e-4, 2e-4, 5e-4, ..., 5 the one with the lowest loss after the steps.\n"
        "Rates whose path leaves the picture do not count. Of two equal ones the smaller counts."),
    "optimizers": Figure(optimizers, "optimizers",
        "a model trained by several optimizers: loss by step, bytes of state per parameter", by_each, add_run_flags),
    "schedule": Figure(schedule, "",
        "a pipeline's forwards and backwards in slots, and its bubble (with --pp)"),
    "experts": Figure(experts, "",
        "a heat map: tokens by expert, by rank and block, of a real run; with --routing as a plan assumes them",
        routed, add_run_flags),
    "ownership": Figure(ownership, "stages",
        "a slide: which rank holds which states, by ZeRO stage; with --stage before, during and after backward"),
    "flow": Figure(flow, "",
        "a slide: where bytes go between ranks in each phase of a step, by which collectives"),
    "staircase": Figure(staircase, "",
        "ZeRO-3 animated: each unit is gathered, used and freed in turn (SVG only)", moves=True),
    "ring": Figure(ring, "",
        "a ring all-reduce, animated hop by hop (SVG only)", ring_of, add_ranks, moves=True),
}  # fmt: skip
WORDS = {name: row.words for name, row in FIGURES.items()}


# -- flags ------------------------------------------------------------------------------------------
def add_arguments(parser: Parser) -> None:
    add_kinds(parser, "figure", WORDS, width=12)
    parser.add_argument("--all", metavar="DIR", help="write the set of slides and moving pictures into this folder")
    parser.epilog = f"{parser.epilog}\n\nThe ZeRO paper's Figure 1: {EXAMPLE}"


def _add_flags(parser: Parser, figure: Figure) -> None:
    add = parser.add_argument_group("the picture").add_argument
    add("--out", "-o", metavar="FILE", help="output file: a name that ends in .png or .svg")
    add("--theme", choices=("light", "dark"), default="light", help="colours of the sheet (default: light)")
    add("--size", metavar="WxH", type=inches, help="inches, such as 8x4.5 (default: the figure's)")
    for flag in figure.flags.split():
        FLAGS[flag](add)
    if figure.run_flags is not None:
        figure.run_flags(parser)
    parser.epilog = figure.epilog
    parser.set_defaults(limit=None)
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="OUT.json", help="the numbers that are drawn; - for stdout")
    add("--quiet", "-q", action="store_true", help="do not print the names of written files")


# -- the verb ---------------------------------------------------------------------------------------
def main(args: argparse.Namespace) -> int:
    if args.all is not None:
        return _plot_all(args)
    name, parser = kind_parser("plot", "figure", WORDS, args.kind)
    _add_flags(parser, FIGURES[name])
    with parser.naming_as_typed(args.words):
        asked = parser.parse(args.words)
        return _plot(FIGURES[name], argparse.Namespace(**vars(asked), figure=name))


def _plot_all(args: argparse.Namespace) -> int:
    """Draw every picture of the set into one folder. Raises: InputError for a figure named beside --all, and as for a
    folder."""
    if args.kind is not None:
        raise InputError(
            f"--all {args.all}: writes the whole set, but {args.kind} is one figure; choose one of the two"
        )
    folder = made_folder("--all", args.all)
    names = dict.fromkeys(name for name, _ in of_set())
    for name, words in of_set():
        kind, parser = kind_parser("plot", "figure", WORDS, words[0])
        _add_flags(parser, FIGURES[kind])
        asked = parser.parse([*words[1:], "--out", str(folder / name), "--quiet"])
        _plot(FIGURES[kind], argparse.Namespace(**vars(asked), figure=kind))
    print(f"wrote {len(names)} pictures into {printable(args.all)}")
    return 0


def _plot(figure: Figure, args: argparse.Namespace) -> int:
    """Read the flags, check the files, run, draw, and write the picture and its numbers."""
    config, limit, world = figure.needs(args)
    if args.out is None:
        raise InputError("--out: expected a file to draw into, such as -o memory.svg")
    form, kernel = form_of("--out", args.out), ""
    if figure.moves:
        check_moving(args.out, form, args.size)
    about: dict[str, Any] = {"figure": args.figure}
    read = [] if config is None else [config]
    if config is not None:
        about["config"] = config.to_dict()
        if limit is not None and config.model.has_blocks:  # the device decides
            each = [config.at_stage(one) for one in stages_asked(args, config)] if hasattr(args, "stages") else [config]
            recipes = list(dict.fromkeys(one.parallel.recipe for one in each))
            named = f"recipe{'s' * (len(recipes) > 1)} {listed(recipes)}"
            kernel = f", with {config.memory.attention} attention and {named}"
    with one_voice(world) as is_first:
        picture = output(args, "out", *read) if is_first else None
        figures = output(args, "json", *read, apart=[picture]) if is_first else None
        with no_backend():
            from zerosim.report.plots.draw import draw, write_figure
            from zerosim.report.plots.page import check_size
        if args.size is not None:
            check_size(args.size)
        drawn = figure.draw(args, config, limit)
        sheet: Any = drawn.figure if figure.moves else draw(drawn.figure, theme=args.theme, size=args.size)
        values = as_json(lambda: {"schema": 1, **about, **drawn.numbers})

        def write(file: BinaryIO) -> None:
            if figure.moves:
                file.write(sheet.svg.encode())
            else:
                write_figure(sheet, file, form)

        with written((picture, write), (figures, values)):
            pass  # the text below is only true if nothing failed
        if not args.quiet:
            print(f"wrote {printable(args.out)}{kernel}{drawn.said}", file=human_stream(args))
    return drawn.code
