"""`zerosim compare`: the same run in several ZeRO stages, side by side, and whether their weights are the same.

With --optimizers: the same batches with several optimizers, what each keeps, and how far it comes. A stage or an
optimizer that runs out of memory has its place all the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerosim.cli.options import add_run_flags, training_config
from zerosim.cli.outputs import as_json, human_stream, output, show, written
from zerosim.cli.parser import Parser, nearest, stages, whole_number
from zerosim.cli.plan import add_time_flags, device_cluster, device_limit
from zerosim.cli.run import train
from zerosim.cli.streams import one_voice
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import DIFFERENCE, InputError, OutOfMemory

if TYPE_CHECKING:
    from zerosim.ledger.clock import StepTime


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--stages", metavar="0,1,2,3", type=stages, help="which ZeRO stages (default: 0,1,2,3)")
    parser.add_argument(
        "--optimizers", metavar="adam,lion,...", type=_optimizers, help="several optimizers, at one --stage"
    )
    parser.add_argument(
        "--stage", "--zero-stage", "-z", metavar="0..3", type=whole_number, default=argparse.SUPPRESS,
        help="with --optimizers: the ZeRO stage (default: 3)",
    )  # fmt: skip
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
    if args.optimizers is not None:
        return _compare_optimizers(args)
    if hasattr(args, "stage"):
        raise InputError(f"--stage {args.stage}: compare shows several, --stages 0,1,2,3; one is for --optimizers")
    base, wanted = training_config(args), args.stages or (0, 1, 2, 3)
    with one_voice(base.world.transport) as is_first:
        figures = output(args, "json", base) if is_first else None  # the first process writes for all
        cluster = device_cluster(args, device_limit(args, None))
        from zerosim.report.compare import Comparison

        outcomes: dict[int, Any] = {}
        for stage in wanted:
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


def _compare_optimizers(args: argparse.Namespace) -> int:
    """The same batches with each optimizer, with its own learning rate unless one is given."""
    if hasattr(args, "optimizer"):
        raise InputError(f"--optimizer {args.optimizer} and --optimizers are both given: choose one")
    if args.gpu is not None:
        raise InputError(f"--gpu {args.gpu}: of --stages; an optimizer's step is timed by zerosim plan")
    if args.stages is not None:
        raise InputError("--stages: with --optimizers one stage, such as --stage 2")
    base = training_config(args)
    with one_voice(base.world.transport) as is_first:
        figures = output(args, "json", base) if is_first else None
        from zerosim.report.compare_optimizers import OptimizerComparison

        outcomes: dict[str, Any] = {}
        for name in args.optimizers:
            if not args.quiet:
                print(f"{OPTIMIZERS[name].title}:", file=human_stream(args))
            try:
                outcomes[name] = train(base.replace(optimizer=name), human_stream(args), quiet=args.quiet)
            except OutOfMemory as error:
                outcomes[name] = error
        comparison = OptimizerComparison(base, outcomes)
        with written((figures, as_json(comparison.to_dict))):
            if not args.quiet:
                print(file=human_stream(args))
                show(args, comparison)
    return OutOfMemory.exit_code if comparison.failures else 0


def _optimizers(text: str) -> tuple[str, ...]:
    """'adam,lion': known optimizers, each once."""
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in names:
        if name not in OPTIMIZERS:
            raise argparse.ArgumentTypeError(
                f"unknown optimizer {name!r}{nearest(name, OPTIMIZERS, 'zerosim run --help')}"
            )
    return names
