"""`zerosim bench`: what a step costs, as ratios measured on this machine, beside their goals."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
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
    from zerosim.cli.outputs import Output, write_all

    on_gpu = args.backend == "cuda"
    if on_gpu and args.torch_distributed:
        raise InputError("--torch-distributed with --backend cuda: FSDP2 is timed on gloo and CPUs: leave one out")
    output = None if args.json is None else Output("--json", args.json)
    if output is not None:
        output.check()
    started = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - started:5.1f} s] {line}", file=sys.stderr, flush=True)

    words, text = _measure_gpu(args, say) if on_gpu else _measure_cpu(args, say)

    def fill(file: BinaryIO) -> None:
        file.write(text.encode())

    lost = write_all((output, fill))
    print("\n".join(words))
    if lost is not None:
        raise lost
    return 0


def _measure_cpu(args: argparse.Namespace, say: Callable[[str], None]) -> tuple[list[str], str]:
    """Ratios on this machine's cores: what is to be printed, and their JSON."""
    from zerosim.bench import bystanders, figures, suite

    names = {"small": ["0.8M"], "large": ["10.7M"], "both": ["0.8M", "10.7M"]}
    models = {name: suite.MODELS[name] for name in names[args.model or ("small" if args.quick else "both")]}
    others = bystanders.Bystanders()
    efforts = suite.QUICK if args.quick else suite.FULL
    had = list(suite.measure(models, efforts, say, torch_distributed=args.torch_distributed))
    machine = {**suite.machine(), "others": others.share()}
    words = [
        figures.table(had),
        figures.summary(had),
        f"Method: {figures.METHOD}. Times are of one step of 2,048 tokens, or of a process.",
        f"Machine: {', '.join(f'{key} {value}' for key, value in machine.items())}",
        *_others(machine["others"]),
    ]
    return words, figures.to_json(had, machine)


def _measure_gpu(args: argparse.Namespace, say: Callable[[str], None]) -> tuple[list[str], str]:
    """Steps on the GPU, as `_measure_cpu`. Raises: InputError where there is none that can be used."""
    from zerosim.backends.cuda.check import check_cuda

    check_cuda()
    from zerosim.bench import bystanders, cuda_device, cuda_suite, figures

    names = {"small": ["45M"], "large": ["124M"], "both": ["45M", "124M"]}
    models = {name: cuda_suite.MODELS[name] for name in names[args.model or ("small" if args.quick else "large")]}
    others, device = bystanders.Bystanders(), cuda_device.describe()
    plan = cuda_suite.QUICK if args.quick else cuda_suite.FULL
    outcomes = list(cuda_suite.measure(models, plan, device, say))
    had = [figure for outcome in outcomes for figure in outcome.figures]
    machine = {**device, "others": others.share()}
    words = [
        figures.table(had),
        figures.summary(had),
        f"Method: {cuda_suite.METHOD}.",
        f"PyTorch: {cuda_suite.PYTORCH}.",
        f"Device: {cuda_device.device_line(device)}",
        *_others(machine["others"]),
    ]
    about = f"{cuda_suite.METHOD}. PyTorch: {cuda_suite.PYTORCH}"
    return words, figures.to_json(had, machine, about, [outcome.group for outcome in outcomes])


def _others(share: float | None) -> list[str]:
    """That the machine was not alone, where anybody knows."""
    return [] if share is None else [f"Other processes took {100 * share:.0f} % of the cores' time meanwhile."]
