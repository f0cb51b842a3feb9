"""`zerosim compare`: the same run in several ZeRO stages, side by side, and whether their weights are the same.

A stage that runs out of memory has its column all the same.
"""

from __future__ import annotations

import argparse
from typing import Any

from zerosim.cli.options import add_run_flags, training_config
from zerosim.cli.outputs import as_json, human_stream, output, show, written
from zerosim.cli.parser import Parser, stages
from zerosim.cli.run import train
from zerosim.cli.streams import one_voice
from zerosim.errors import DIFFERENCE, OutOfMemory


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
    with one_voice(base.world.transport) as is_first:
        figures = output(args, "json", base) if is_first else None  # the first process writes for all
        from zerosim.report.compare import Comparison

        outcomes: dict[int, Any] = {}
        for stage in args.stages:
            try:
                outcomes[stage] = train(base.at_stage(stage), human_stream(args), quiet=args.quiet)
            except OutOfMemory as error:
                outcomes[stage] = error
        comparison = Comparison(base, outcomes)
        with written((figures, as_json(comparison.to_dict))):
            if not args.quiet:
                print(file=human_stream(args))
                show(args, comparison)
    if comparison.failures:
        return OutOfMemory.exit_code
    return DIFFERENCE if comparison.contradictions else 0
