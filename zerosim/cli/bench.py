"""`zerosim bench`: what a step costs, as ratios measured on this machine, beside their goals."""

from __future__ import annotations

import argparse
import sys
import time
from typing import BinaryIO

from zerosim.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        choices=("numpy", "cuda"),
        default="numpy",
        help="numpy: ratios on this machine's cores; cuda: steps on its GPU, timed with device events",
    )
    parser.add_argument(
        "--model",
        choices=("small", "large", "both"),
        help="small: 0.8M parameters, large: 10.7M (default: both; with --quick: small); "
        "on cuda small: 45M, large: 124M (default: large; with --quick: small)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: half a minute instead of minutes")
    parser.add_argument(
        "--torch-distributed",
        action="store_true",
        help="also 20 steps start to finish against FSDP2 on gloo with 4 processes (needs PyTorch)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")


def main(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0 whether goals are met or not: they are goals, not checks.

    Raises: InputError for an output that cannot be written and, on cuda, a GPU that cannot be used, before anything
    is measured.
    """
    from zerosim.cli.outputs import Output, written

    on_gpu = args.backend == "cuda"
    if on_gpu and args.torch_distributed:
        raise InputError("--torch-distributed with --backend cuda: FSDP2 is timed on gloo and CPUs: leave one out")
    output = None if args.json is None else Output("--json", args.json)
    if output is not None:
        output.check()
    if on_gpu:
        from zerosim.backends.cuda.check import check_cuda

        check_cuda()
    from zerosim.bench import figures, machine
    from zerosim.bench.suite import SUITES, measure

    started = time.perf_counter()

    def progress(line: str) -> None:
        print(f"[{time.perf_counter() - started:5.1f} s] {line}", file=sys.stderr, flush=True)

    suite = SUITES[args.backend]
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

    def fill(file: BinaryIO) -> None:
        file.write(figures.to_json(found, about, suite.method, rounds).encode())

    with written((output, fill)):
        print(figures.table(found), figures.summary(found), *suite.explanation, machine.described(about), sep="\n")
        if share is not None:
            print(f"Other processes took {100 * share:.0f} % of the cores' time meanwhile.")
    return 0
