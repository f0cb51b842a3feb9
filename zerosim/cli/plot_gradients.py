"""`zerosim plot gradients`: a real run's gradients against what narrow formats hold, by loss scale."""

from __future__ import annotations

import argparse

from zerosim.cli.options import add_run_flags, training_config
from zerosim.cli.outputs import human_stream
from zerosim.cli.parser import Parser, flag_of
from zerosim.cli.plot_file import check_sheet, figure_files, leave
from zerosim.errors import InputError


def add_gradient_flags(parser: Parser) -> None:
    add_run_flags(parser)
    parser.epilog = (
        "One rank trains in fp32 without ZeRO, so that the true size of each gradient is known. What backward\n"
        "leaves is counted in every step, before clipping: by power of two, and after a cast of scale times\n"
        "gradient to each format. After Figure 3 of Mixed Precision Training (arXiv 1710.03740)."
    )


def gradients(args: argparse.Namespace) -> int:
    from zerosim.train.gradients import FIXED, FORMATS, count_gradients, on_one_rank

    for name, value in FIXED.items():
        if getattr(args, name, value) != value:
            always = f"gradients are counted with {flag_of(name)} {value}"
            why = "every loss scale is tried" if value is None else always
            raise InputError(f"{flag_of(name)} {getattr(args, name)}: {why}; leave it out")
    config = on_one_rank(training_config(args))
    files = figure_files(args, config)
    check_sheet(args)
    from zerosim.report.plots import gradients_figure
    from zerosim.report.progress import progress_on
    from zerosim.train.run import DEFAULT_STEPS

    steps = config.optim.steps or (None if config.data.tokens else DEFAULT_STEPS)
    with progress_on(human_stream(args), 1, steps, "fp32", quiet=args.quiet) as progress:
        found = count_gradients(config, progress=progress)
    psi = f"Ψ = {found.num // max(found.steps, 1):,} parameters"
    subtitle = f"{config.model.name} of {psi} on one rank, fp32 with {config.optim.optimizer}"
    figure = gradients_figure(found, subtitle=subtitle, theme=args.theme, size=args.size)
    lost = [(name, found.share(name, 0)) for name in FORMATS]
    said = ", ".join(f"{name} {share['to_zero'] + share['overflowed']:.2%}" for name, share in lost)
    about = {"figure": "gradients", "config": config.to_dict()}
    leave(args, files, (figure, found.to_dict()), about, f"; lost without a loss scale: {said}")
    return 0
