"""`zerosim bench`: what a step costs, as ratios measured on this machine, beside their goals."""

from __future__ import annotations

import argparse
import sys
import time
from typing import BinaryIO


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        choices=("small", "large", "both"),
        help="small: 0.8M parameters, large: 10.7M (default: both; with --quick: small)",
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

    Raises: InputError for an output that cannot be written, before anything is measured.
    """
    from zerosim.cli.outputs import Output

    output = None if args.json is None else Output("--json", args.json)
    if output is not None:
        output.check()
    from zerosim.bench import bystanders, figures, suite

    names = {"small": ["0.8M"], "large": ["10.7M"], "both": ["0.8M", "10.7M"]}
    models = {name: suite.MODELS[name] for name in names[args.model or ("small" if args.quick else "both")]}
    started = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - started:5.1f} s] {line}", file=sys.stderr, flush=True)

    others = bystanders.Bystanders()
    efforts = suite.QUICK if args.quick else suite.FULL
    had = list(suite.measure(models, efforts, say, torch_distributed=args.torch_distributed))
    machine = {**suite.machine(), "others": others.share()}
    print(figures.table(had))
    print(figures.summary(had))
    print(f"Method: {figures.METHOD}. Times are of one step of 2,048 tokens, or of a process.")
    print(f"Machine: {', '.join(f'{key} {value}' for key, value in machine.items())}")
    if machine["others"] is not None:
        print(f"Other processes took {100 * machine['others']:.0f} % of the cores' time meanwhile.")
    if output is not None:
        text = figures.to_json(had, machine)

        def fill(file: BinaryIO) -> None:
            file.write(text.encode())

        output.write(fill)
    return 0
