"""`zerosim compare`: the same run in several ZeRO stages, side by side, and whether their weights are the same.

A stage that runs out of memory has its column all the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerosim.cli.options import add_run_flags, training_config
from zerosim.cli.outputs import as_json, human_stream, output, show, written
from zerosim.cli.parser import Parser, stages
from zerosim.cli.plan import add_time_flags, device_cluster, device_limit
from zerosim.cli.run import train
from zerosim.cli.streams import one_voice
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.errors import DIFFERENCE, OutOfMemory

if TYPE_CHECKING:
    from zerosim.ledger.clock import StepTime


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--stages", metavar="0,1,2,3", type=stages, default=(0, 1, 2, 3), help="which ZeRO stages (default: 0,1,2,3)"
    )
    group = parser.add_argument_group("time, modelled")
    group.add_argument("--gpu", metavar="NAME", help="on which a step of each stage is timed, such as a100-80")
    add_time_flags(group.add_argument)
    add_run_flags(parser, stage=False)
    parser.set_defaults(limit=None, reserve=None)
    group = parser.add_argument_group("what it leaves")
    group.add_argument("--json", metavar="OUT.json", help="every figure of every run; - for stdout")
    group.add_argument("--quiet", "-q", action="store_true", help="no progress and no table")


def _timed(
    base: RunConfig, outcomes: Mapping[int, Any], cluster: Cluster | None
) -> tuple[dict[int, StepTime], Cluster | None]:
    """How long a step of each stage that was run takes by the clock: a plan of the same configuration on shapes, whose
    record is the run's."""
    from zerosim.train.plan import plan

    if cluster is None:
        return {}, None
    ran = [stage for stage, outcome in outcomes.items() if not isinstance(outcome, OutOfMemory)]
    on_shapes = base.replace(steps=1, capacity=None)
    results = {stage: plan(on_shapes.at_stage(stage), cluster=cluster) for stage in ran}
    return {stage: result.time for stage, result in results.items() if result.time is not None}, cluster


def main(args: argparse.Namespace) -> int:
    base = training_config(args)
    with one_voice(base.world.transport) as is_first:
        figures = output(args, "json", base) if is_first else None  # the first process writes for all
        cluster = device_cluster(args, device_limit(args, None))
        from zerosim.report.compare import Comparison

        outcomes: dict[int, Any] = {}
        for stage in args.stages:
            try:
                outcomes[stage] = train(base.at_stage(stage), human_stream(args), quiet=args.quiet)
            except OutOfMemory as error:
                outcomes[stage] = error
        comparison = Comparison(base, outcomes, *_timed(base, outcomes, cluster))
        with written((figures, as_json(comparison.to_dict))):
            if not args.quiet:
                print(file=human_stream(args))
                show(args, comparison)
    if comparison.failures:
        return OutOfMemory.exit_code
    return DIFFERENCE if comparison.contradictions else 0
