"""`zerosim compare`: the same run in several ZeRO stages, side by side, and whether their weights are the same.

With --optimizers: the same batches with several optimizers, what each keeps, and how far it comes; with --precisions:
in several number formats. A run that is out of memory has its place all the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from zerosim.cli.options import add_run_flags, training_config
from zerosim.cli.outputs import as_json, human_stream, output, show, written
from zerosim.cli.parser import Parser, nearest, stages, whole_number
from zerosim.cli.plan import add_time_flags, device_cluster, device_limit
from zerosim.cli.run import train
from zerosim.cli.streams import one_voice
from zerosim.config import RunConfig
from zerosim.config.option import known_word
from zerosim.config.parts import FLOATS, PURE, ROUNDINGS
from zerosim.config.presets.cluster import Cluster
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import DIFFERENCE, InputError, OutOfMemory

if TYPE_CHECKING:
    from zerosim.ledger.clock import StepTime
    from zerosim.train.result import RunResult


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--stages", metavar="0,1,2,3", type=stages, help="which ZeRO stages (default: 0,1,2,3)")
    parser.add_argument(
        "--optimizers", metavar="adam,lion,...", type=optimizer_names, help="several optimizers, at one --stage"
    )
    parser.add_argument(
        "--precisions", metavar="bf16,bf16-pure:kahan,...", type=precision_names,
        help="several number formats, bf16-pure with a rounding after a colon, at one --stage",
    )  # fmt: skip
    parser.add_argument(
        "--stage", "--zero-stage", "-z", metavar="0..3", type=whole_number, default=argparse.SUPPRESS,
        help="with --optimizers or --precisions: the ZeRO stage (default: 3)",
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
    on_shapes = base.replace(steps=None, capacity=None)
    results = {stage: plan(on_shapes.at_stage(stage), cluster=cluster) for stage in ran}
    return {stage: result.time for stage, result in results.items() if result.time is not None}, cluster


def main(args: argparse.Namespace) -> int:
    if args.optimizers is not None or args.precisions is not None:
        return _compare_variants(args)
    if hasattr(args, "stage"):
        raise InputError(
            f"--stage {args.stage}: compare shows several, --stages 0,1,2,3; one is for --optimizers and --precisions"
        )
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


def _compare_variants(args: argparse.Namespace) -> int:
    """The same batches with each optimizer, with its own learning rate unless one is given, or in each precision."""
    flag = "optimizers" if args.optimizers is not None else "precisions"
    for name in ("optimizer", "precisions") if flag == "optimizers" else ("precision", "rounding"):
        if getattr(args, name, None) is not None:
            raise InputError(f"--{name} and --{flag} are both given: choose one")
    if args.gpu is not None:
        raise InputError(f"--gpu {args.gpu}: of --stages; zerosim plan times a step of any other run")
    if args.stages is not None:
        raise InputError(f"--stages: with --{flag} one stage, such as --stage 2")
    base = training_config(args)
    with one_voice(base.world.transport) as is_first:
        figures = output(args, "json", base) if is_first else None
        from zerosim.report.compare_optimizers import OptimizerComparison, PrecisionComparison

        comparison: OptimizerComparison
        if flag == "optimizers":
            comparison = OptimizerComparison(base, train_optimizers(base, args.optimizers, args))
        else:
            changes = {name: _precision(name) for name in args.precisions}
            comparison = PrecisionComparison(base, _train_each(base, changes, {}, args))
        with written((figures, as_json(comparison.to_dict))):
            if not args.quiet:
                print(file=human_stream(args))
                show(args, comparison)
    return OutOfMemory.exit_code if comparison.failures else 0


def train_optimizers(
    base: RunConfig, names: Iterable[str], args: argparse.Namespace
) -> dict[str, RunResult | OutOfMemory]:
    """A run with each optimizer, with progress for people; an OutOfMemory stands for one that did not fit."""
    titles = {name: OPTIMIZERS[name].title for name in names}
    return _train_each(base, {name: {"optimizer": name} for name in titles}, titles, args)


def _train_each(
    base: RunConfig, changes: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str], args: argparse.Namespace
) -> dict[str, RunResult | OutOfMemory]:
    configs = {name: base.replace(**of) for name, of in changes.items()}  # what is refused is refused before a run
    outcomes: dict[str, RunResult | OutOfMemory] = {}
    for name, config in configs.items():
        if not args.quiet:
            print(f"{titles.get(name, name)}:", file=human_stream(args))
        try:
            outcomes[name] = train(config, human_stream(args), quiet=args.quiet)
        except OutOfMemory as error:
            outcomes[name] = error
    return outcomes


def optimizer_names(text: str) -> tuple[str, ...]:
    """'adam,lion': known optimizers, each once."""
    return _names(text, "optimizer", OPTIMIZERS)


def precision_names(text: str) -> tuple[str, ...]:
    """'bf16,bf16-pure:kahan': known number formats and ways to round, each once."""
    return _names(text, "precision", [*FLOATS, PURE, *(f"{PURE}:{kind}" for kind in ROUNDINGS)])


def _names(text: str, what: str, known: Collection[str]) -> tuple[str, ...]:
    """Known names with commas between, each once. Raises: ArgumentTypeError with the nearest for an unknown one."""
    found = []
    for word in text.split(","):
        name = known_word(word, known)
        if name is None:
            near = nearest(word.strip(), known, "zerosim run --help")
            raise argparse.ArgumentTypeError(f"unknown {what} {word.strip()!r}{near}")
        found.append(name)
    return tuple(dict.fromkeys(found))


def _precision(name: str) -> dict[str, Any]:
    """The fields of 'bf16-pure:kahan'."""
    precision, _, rounding = name.partition(":")
    return {"precision": precision, "rounding": rounding or None}
