"""`zerosim compare`: run the same configuration at several ZeRO stages, side by side, and compare their weights.

A model that is too large to train here is planned on shapes alone (`compare_plans.py`); so are two files. With
--optimizers it trains on the same batches with several optimizers, and shows each one's states and loss. With
--precisions it compares number formats, with --compressions ways to send gradients. A run that is out of memory
keeps its row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from zerosim.cli.compare_plans import compare_files, compare_stages, goes_by_shapes
from zerosim.cli.options import add_run_flags, training_config
from zerosim.cli.outputs import human_stream, leave, output
from zerosim.cli.parser import Parser, nearest, stages, whole_number
from zerosim.cli.plan import add_time_flags, device_cluster, device_limit
from zerosim.cli.run import train
from zerosim.cli.streams import one_voice
from zerosim.config import RunConfig
from zerosim.config.option import known_word
from zerosim.config.parts.compression import steps_until_coded
from zerosim.config.parts.precision import FLOATS, PURE, ROUNDINGS
from zerosim.config.parts.reduction import COMPRESSION_OPTIONS, COMPRESSIONS
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.errors import DIFFERENCE, InputError, OutOfMemory

if TYPE_CHECKING:
    from zerosim.report.compare import Comparison, CompressionComparison, OptimizerComparison, PrecisionComparison
    from zerosim.train.result import RunResult

K = TypeVar("K")


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add_run_flags(parser, stage=False, beside=False)
    other = "a second one: both are planned and compared; flags override both"
    add("other", nargs="?", metavar="OTHER.toml", help=other)
    add("--stages", metavar="0,1,2,3", type=stages, help="ZeRO stages to compare (default: 0,1,2,3)")
    alone = "run the stages on tensor shapes only (default: where training them here would take half an hour or more)"
    add("--shapes", action=argparse.BooleanOptionalAction, help=alone)
    add("--optimizers", metavar="adam,lion,...", type=optimizer_names, help="several optimizers, at one --stage")
    formats = "several number formats, bf16-pure with a rounding after a colon, at one --stage"
    add("--precisions", metavar="bf16,bf16-pure:kahan,...", type=precision_names, help=formats)
    sent = "several compressions of gradients, none among them, at one --stage"
    add("--compressions", metavar="none,int8,top-k,...", type=compression_names, help=sent)
    one = "with --optimizers, --precisions or --compressions: the ZeRO stage (default: 3)"
    names = "--stage", "--zero-stage", "-z"
    add(*names, metavar="0..3", type=whole_number, default=argparse.SUPPRESS, help=one)
    group = parser.add_argument_group("time, modelled")
    group.add_argument("--gpu", metavar="NAME", help="on which a step of each stage is timed, such as a100-80")
    add_time_flags(group.add_argument)
    parser.set_defaults(limit=None, reserve=None)
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="OUT.json", help="every figure of every run; - for stdout")
    group.add_argument("--quiet", "-q", action="store_true", help="no progress and no table")


def main(args: argparse.Namespace) -> int:
    if args.other is not None:
        return compare_files(args)
    flag = next((flag for flag in _COMPARED if flag != "stages" and getattr(args, flag) is not None), "stages")
    _check(args, flag)
    if flag == "stages" and goes_by_shapes(args):
        return compare_stages(args)
    args.of_compressions = _taken(args) if flag == "compressions" else {}
    base = training_config(args)
    with one_voice(base.world.transport) as is_first:
        figures = output(args, "json", base) if is_first else None  # the first process writes for all
        comparison = _COMPARED[flag](base, args)
        leave(args, figures, comparison.to_dict, lambda: comparison, after_progress=True)
    if comparison.failures:
        return OutOfMemory.exit_code
    return DIFFERENCE if getattr(comparison, "contradictions", ()) else 0


def _taken(args: argparse.Namespace) -> dict[str, Any]:
    """Take options of single compressions out of `args`: without a compression they have no meaning."""
    return {name: vars(args).pop(name) for name in COMPRESSION_OPTIONS if hasattr(args, name)}


def _check(args: argparse.Namespace, flag: str) -> None:
    """Check the flags. Raises: InputError for flags that do not go with the kind of comparison."""
    if flag == "stages":
        if hasattr(args, "stage"):
            several = (
                "compare takes --stages 0,1,2,3; --stage works only with --optimizers, --precisions or --compressions"
            )
            raise InputError(f"--stage {args.stage}: {several}")
        return
    apart = {"optimizers": ("optimizer", "precisions", "compressions"), "precisions": ("precision", "rounding")}
    for name in apart.get(flag, ("compress",)):
        if getattr(args, name, None) is not None:
            raise InputError(f"--{name} and --{flag} are both given: choose one")
    if args.shapes:
        raise InputError(f"--shapes: works only with --stages; --{flag} compares training runs")
    for name in ("gpu", "node"):
        if (value := getattr(args, name)) is not None:
            raise InputError(f"--{name} {value}: works only with --stages; zerosim plan times a step of any other run")
    device_cluster(args, None)  # without a clock its flags are errors too
    if args.stages is not None:
        raise InputError(f"--stages: --{flag} compares at one stage; pass --stage 2 instead")


def _stages(base: RunConfig, args: argparse.Namespace) -> Comparison:
    """Run each ZeRO stage. With --gpu also plan each stage on shapes for the clock's step time; the plan's
    record equals the run's."""
    from zerosim.report.compare import Comparison
    from zerosim.train.plan import plan

    cluster = device_cluster(args, device_limit(args, None))
    outcomes = _train_each({stage: base.at_stage(stage) for stage in args.stages or (0, 1, 2, 3)}, args)
    ran = [stage for stage, outcome in outcomes.items() if cluster is not None and not isinstance(outcome, OutOfMemory)]
    on_shapes = base.replace(steps=None, capacity=None)
    times = {stage: plan(on_shapes.at_stage(stage), cluster=cluster).time for stage in ran}
    return Comparison(base, outcomes, {stage: time for stage, time in times.items() if time is not None}, cluster)


def _optimizers(base: RunConfig, args: argparse.Namespace) -> OptimizerComparison:
    """Train on the same batches with each optimizer, with its own learning rate unless one is given."""
    from zerosim.report.compare import OptimizerComparison

    return OptimizerComparison(base, train_optimizers(base, args.optimizers, args))


def _precisions(base: RunConfig, args: argparse.Namespace) -> PrecisionComparison:
    """Train on the same batches in each precision; 'bf16-pure:kahan' names one with its rounding."""
    from zerosim.report.compare import PrecisionComparison

    configs = {}
    for name in args.precisions:
        precision, _, rounding = name.partition(":")
        configs[name] = base.replace(precision=precision, rounding=rounding or None)
    return PrecisionComparison(base, _train_each(configs, args, dict(zip(configs, configs, strict=True))))


def _compressions(base: RunConfig, args: argparse.Namespace) -> CompressionComparison:
    """Train on the same batches with each way to send gradients, and model a step over a slow and a fast link."""
    from zerosim.config.presets.cluster import cluster_of
    from zerosim.config.presets.hardware import find_hardware
    from zerosim.report.compare import LINKS, CompressionComparison
    from zerosim.train.plan import plan

    configs = {}
    for name in args.compressions:
        own = {option: value for option, value in args.of_compressions.items() if name in COMPRESSION_OPTIONS[option]}
        configs[name] = base.replace(compress=name, **own)
    outcomes = _train_each(configs, args, {name: name for name in configs})
    clusters = [cluster_of(find_hardware("a100-80"), node_gpus=1, nic_bytes_per_s=rate) for rate in LINKS.values()]
    times = {
        name: [plan(config.replace(steps=1 + before), cluster=one).time for one in clusters]
        for name, config in configs.items()
        if (before := steps_until_coded(config.reduction)) is not None
    }
    return CompressionComparison(base, outcomes, times)


_COMPARED: Mapping[str, Callable[[RunConfig, argparse.Namespace], Comparison | OptimizerComparison]] = {
    "stages": _stages,
    "optimizers": _optimizers,
    "precisions": _precisions,
    "compressions": _compressions,
}
"""The comparison of each flag."""


def train_optimizers(
    base: RunConfig, names: Iterable[str], args: argparse.Namespace
) -> dict[str, RunResult | OutOfMemory]:
    """Run with each optimizer and show progress. An OutOfMemory stands for a run that did not fit."""
    configs = {name: base.replace(optimizer=name) for name in names}
    return _train_each(configs, args, {name: OPTIMIZERS[name].title for name in configs})


def _train_each(
    configs: Mapping[K, RunConfig], args: argparse.Namespace, titles: Mapping[K, str] | None = None
) -> dict[K, RunResult | OutOfMemory]:
    outcomes: dict[K, RunResult | OutOfMemory] = {}
    for key, config in configs.items():
        if titles is not None and not args.quiet:
            print(f"{titles[key]}:", file=human_stream(args))
        try:
            outcomes[key] = train(config, human_stream(args), quiet=args.quiet)
        except OutOfMemory as error:
            outcomes[key] = error
    return outcomes


def optimizer_names(text: str) -> tuple[str, ...]:
    """Parse 'adam,lion': known optimizers, each once."""
    return _names(text, "optimizer", OPTIMIZERS)


def precision_names(text: str) -> tuple[str, ...]:
    """Parse 'bf16,bf16-pure:kahan': known number formats and ways to round, each once."""
    return _names(text, "precision", [*FLOATS, PURE, *(f"{PURE}:{kind}" for kind in ROUNDINGS)])


def compression_names(text: str) -> tuple[str, ...]:
    """Parse 'none,int8,top-k': known compressions, each once."""
    return _names(text, "compression", COMPRESSIONS)


def _names(text: str, what: str, known: Collection[str]) -> tuple[str, ...]:
    """Parse known names with commas between, each once. Raises: ArgumentTypeError with the nearest for an unknown
    one."""

    def meant(word: str) -> str:
        if name := known_word(word, known):
            return name
        near = nearest(word.strip(), known, "zerosim run --help-all")
        raise argparse.ArgumentTypeError(f"unknown {what} {word.strip()!r}{near}")

    return tuple(dict.fromkeys(map(meant, text.split(","))))
