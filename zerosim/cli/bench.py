"""`zerosim bench`: the cost of a step, as ratios measured on this machine, beside their goals."""

from __future__ import annotations

import argparse

from zerosim.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, cores = parser.add_argument, "small: 0.8M parameters, large: 10.7M (default: both; with --quick: small)"
    kinds = "numpy: ratios on this machine's cores; cuda: steps on its GPU, timed with device events"
    add("--backend", choices=("numpy", "cuda"), default="numpy", help=kinds)
    sizes = f"{cores}; on cuda small: 45M, large: 124M (default: large; with --quick: small)"
    add("--model", choices=("small", "large", "both"), help=sizes)
    add("--quick", action="store_true", help="fewer repetitions: half a minute instead of minutes")
    against = "also 20 steps start to finish against FSDP2 on gloo with 4 processes (needs PyTorch)"
    add("--torch-distributed", action="store_true", help=against)
    add("--json", metavar="FILE", help="write the figures to FILE")


def main(args: argparse.Namespace) -> int:
    """Measure and print. Return 0 even if goals are missed: they are goals, not checks.

    Raises: InputError for an output that cannot be written and, on cuda, a GPU that cannot be used, before anything
    is measured.
    """
    from zerosim.cli.outputs import Output, written
    from zerosim.cli.streams import stopwatch

    on_gpu = args.backend == "cuda"
    if on_gpu and args.torch_distributed:
        raise InputError(
            "--torch-distributed with --backend cuda: FSDP2 is timed on gloo and CPUs only; leave one of them out"
        )
    output = None if args.json is None else Output("--json", args.json)
    if output is not None:
        output.check()
    if on_gpu:
        from zerosim.backends.cuda.check import check_cuda

        check_cuda()
    from zerosim.bench import figures, machine
    from zerosim.bench.suite import SUITES, measure

    progress, suite = stopwatch(), SUITES[args.backend]
    small, *large = suite.models
    size = args.model or ("small" if args.quick else suite.default)
    names = {"small": [small], "large": large, "both": [small, *large]}[size]
    budgets = suite.quick if args.quick else suite.full
    others, device = machine.OtherLoad(), machine.describe(args.backend)
    models = {name: suite.models[name] for name in names}
    groups = list(measure(suite, models, budgets, device, progress, torch_distributed=args.torch_distributed))

    found = [figure for group in groups for figure in group.figures]
    rounds = [group.rounds for group in groups if group.rounds is not None]
    share = others.share()
    about = {**device, "others": share}

    text = figures.to_json(found, about, suite.method, rounds)
    with written((output, lambda file: file.write(text.encode()))):
        print(figures.table(found), figures.summary(found), *suite.explanation, machine.described(about), sep="\n")
        if share is not None:
            print(f"Other processes took {100 * share:.0f} % of the cores' time meanwhile.")
    return 0
