"""`zerosim plot`'s figures of optimizers: their paths on surfaces of two weights, and one model trained by each."""

from __future__ import annotations

import argparse
from typing import Any

from zerosim.analysis.surfaces import SURFACES
from zerosim.cli.compare import optimizer_names, train_optimizers
from zerosim.cli.options import add_run_flags, training_config
from zerosim.cli.parser import Parser, nearest, whole_number
from zerosim.cli.plot_file import check_sheet, figure_files, leave
from zerosim.cli.streams import one_voice
from zerosim.config.option import known_word
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import InputError, OutOfMemory

MOST_STEPS = 10_000


def add_descent_flags(parser: Parser, add: Any) -> None:
    words = "which, up to 8 (default: sgd,adam,lion)"
    add("--optimizers", metavar="sgd,adam,...", type=optimizer_names, default=("sgd", "adam", "lion"), help=words)
    words = f"{', '.join(SURFACES)}, or all of them (default: all)"
    add("--surface", metavar="NAME", type=_surfaces, default=tuple(SURFACES), help=words)
    add("--steps", metavar="S", type=_steps, default=100, help="steps of each (default: 100)")
    parser.epilog = (
        "The optimizers are those that train, on a flat of two weights in fp32. Each has its own\n"
        "learning rate: of 1e-4, 2e-4, 5e-4, ..., 5 the one whose loss is lowest after the steps,\n"
        "among those whose path stays within the picture; of two that are even, the smaller."
    )


def add_training_flags(parser: Parser, add: Any) -> None:
    words = "which, up to 8 (default: sgd,adam,lion)"
    add("--optimizers", metavar="sgd,adam,...", type=optimizer_names, default=("sgd", "adam", "lion"), help=words)
    add_run_flags(parser)


def descent(args: argparse.Namespace) -> int:
    from zerosim.analysis.descent import best_paths, check_shows

    for name in args.optimizers:
        check_shows(name)
    _check_count(args.optimizers)
    files = figure_files(args)
    check_sheet(args)
    from zerosim.report.plots import descent_figure

    paths = best_paths(args.surface, args.optimizers, args.steps)
    figure = descent_figure(paths, theme=args.theme, size=args.size)
    values = {name: {title: path.to_dict() for title, path in of.items()} for name, of in paths.items()}
    leave(args, files, (figure, {"paths": values}), {"figure": "descent", "steps": args.steps})
    return 0


def optimizers(args: argparse.Namespace) -> int:
    if hasattr(args, "optimizer"):
        raise InputError(f"--optimizer {args.optimizer} and --optimizers are both given: choose one")
    _check_count(args.optimizers)
    base = training_config(args)
    with one_voice(base.world.transport) as is_first:
        files = figure_files(args, base) if is_first else None
        check_sheet(args)
        from zerosim.report.compare_optimizers import OptimizerComparison
        from zerosim.report.plots import optimizers_figure

        comparison = OptimizerComparison(base, train_optimizers(base, args.optimizers, args))
        if not comparison.results:
            raise next(iter(comparison.failures.values()))
        failed = [f"{OPTIMIZERS[name].title}: {error}." for name, error in comparison.failures.items()]
        results = {OPTIMIZERS[name].title: result for name, result in comparison.results.items()}
        figure = optimizers_figure(results, notes=failed, theme=args.theme, size=args.size)
        if files is not None:
            about = {"figure": "optimizers", "config": base.to_dict()}
            leave(args, files, (figure, {"runs": comparison.to_dict()["runs"]}), about)
    return OutOfMemory.exit_code if comparison.failures else 0


def _check_count(names: tuple[str, ...]) -> None:
    from zerosim.report.plots.style import LINE_PAINTS

    most = len(LINE_PAINTS)  # that can be told apart
    if len(names) > most:
        raise InputError(f"--optimizers: {len(names)} are more than the {most} that one picture holds: leave some out")


def _surfaces(text: str) -> tuple[str, ...]:
    """'all', or one of them."""
    name = known_word(text, [*SURFACES, "all"])
    if name is None:
        known = nearest(text, [*SURFACES, "all"], "zerosim plot descent --help")
        raise argparse.ArgumentTypeError(f"unknown surface {text!r}{known}")
    return tuple(SURFACES) if name == "all" else (name,)


def _steps(text: str) -> int:
    steps = whole_number(text)
    if not 1 <= steps <= MOST_STEPS:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 to {MOST_STEPS:,} steps")
    return steps
