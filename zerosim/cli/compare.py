"""`zerosim compare`: the same run in several ZeRO stages, side by side, and whether their weights are the same.

A stage that runs out of memory has its column all the same.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from zerosim.cli.options import add_run_flags, training_config
from zerosim.cli.parser import Parser, stages
from zerosim.cli.run import human_stream, json_text, output, train, write_json
from zerosim.comm.together import together
from zerosim.errors import OutOfMemory
from zerosim.scenario import RunConfig

if TYPE_CHECKING:
    from zerosim.report.compare import Comparison


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--stages", metavar="0,1,2,3", type=stages, default=(0, 1, 2, 3), help="which ZeRO stages (default: 0,1,2,3)"
    )
    add_run_flags(parser, stage=False)
    group = parser.add_argument_group("what it leaves")
    group.add_argument("--json", metavar="OUT.json", help="every figure of every run; - for stdout")
    group.add_argument("--quiet", "-q", action="store_true", help="no progress and no table")


def main(args: argparse.Namespace) -> int:
    base = training_config(args)
    with together(base.world):
        return _run(args, base)


def _run(args: argparse.Namespace, base: RunConfig) -> int:
    figures = output(args, "json", base)
    stream = human_stream(args)
    from zerosim.report.compare import Comparison

    outcomes: dict[int, Any] = {}
    for stage in args.stages:
        try:
            outcomes[stage] = train(base.replace(stage=stage), stream, quiet=args.quiet)
        except OutOfMemory as error:
            outcomes[stage] = error
    comparison = Comparison(base, outcomes)
    if figures is not None:
        figures.write(lambda file: write_json(file, comparison.to_dict()))
    elif args.json is not None:
        sys.stdout.write(json_text(comparison.to_dict()))
    if not args.quiet:
        _print(comparison, stream)
    return OutOfMemory.exit_code if comparison.failures else int(bool(comparison.contradictions))


def _print(comparison: Comparison, stream: Any) -> None:
    from zerosim.report.look import emit

    print(file=stream)
    emit(comparison, stream)
