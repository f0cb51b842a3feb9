"""`zerosim compare`: one configuration at several ZeRO stages, recipes, optimizers ..., or two files, side by side.

A comparison maps a column's name to the flags that differ there. Each column trains on the same batches or, where that
would take too long here, is planned on shapes. A column that is refused or out of memory keeps its place.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from zerosim.cli.options import add_run_flags, check_processes, run_config
from zerosim.cli.outputs import human_stream, leave, output
from zerosim.cli.parser import Parser, flag_of, nearest, stages, whole_number
from zerosim.cli.plan import (
    add_time_flags,
    device_cluster,
    device_limit,
    device_of,
    plan_on,
    plan_values,
    planned_config,
)
from zerosim.cli.run import train
from zerosim.cli.streams import one_voice
from zerosim.config import OPTIONS, WITH_VALUES, RunConfig
from zerosim.config.option import known_word
from zerosim.config.parts.compression import steps_until_coded
from zerosim.config.parts.fp8 import SCALINGS
from zerosim.config.parts.precision import FLOATS, PURE, ROUNDINGS
from zerosim.config.parts.reduction import COMPRESSION_OPTIONS, COMPRESSIONS
from zerosim.config.parts.saving import named
from zerosim.config.presets.cluster import Cluster, cluster_of
from zerosim.config.presets.hardware import find_hardware
from zerosim.config.presets.optimizers import OPTIMIZERS
from zerosim.config.presets.recipes import NAMES, USUAL
from zerosim.errors import DIFFERENCE, InputError, OutOfMemory, wrong
from zerosim.placement.memories import DEVICE, MEMORIES

if TYPE_CHECKING:
    from zerosim.report.changes import Changes
    from zerosim.report.compare_rows import Column
    from zerosim.report.verdict import Planned
    from zerosim.train.result import RunResult

NEEDS_TRAINING = [name for name in WITH_VALUES.split() if name != "capacity"]
AXES: Mapping[str, tuple[str, Collection[str], str]] = {
    "stages": ("stage", ("0", "1", "2", "3"), "(default: 0,1,2,3)"),
    "recipes": ("recipe", (*NAMES, USUAL), "at one --stage"),
    "optimizers": ("optimizer", OPTIMIZERS, "at one --stage"),
    "precisions": ("precision", (*FLOATS, PURE, *(f"{PURE}:{kind}" for kind in ROUNDINGS)), "such as bf16-pure:kahan"),
    "scalings": ("scaling", ("none", *SCALINGS), "of products in 8 bits, at one --stage"),
    "compressions": ("compression", COMPRESSIONS, "of gradients, at one --stage"),
    "memories": ("memory", MEMORIES, "of the optimizer's states and, at stage 3, of parameters"),
}
"""By flag what columns may differ in, the names that they may have, and the end of the flag's help."""
Flags = Mapping[str, Any]


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add_run_flags(parser, stage=False, beside=False)
    add("other", nargs="?", metavar="OTHER.toml", help="a second one to compare with; flags override both")
    for flag, (what, known, help) in AXES.items():
        read = stages if what == "stage" else partial(names_of, what, known)
        some = ",".join([*known][:3]) + ",..." * (len(known) > 3)
        add(f"--{flag}", metavar=some, type=read, help=f"compare {'ZeRO ' * (what == 'stage')}{flag} {help}")
    alone = "run on tensor shapes only (default: for two files, and where training would take half an hour or more)"
    add("--shapes", action=argparse.BooleanOptionalAction, help=alone)
    one, names = "where something else is compared: the ZeRO stage (default: 3)", ("--stage", "--zero-stage", "-z")
    add(*names, metavar="0..3", type=whole_number, default=argparse.SUPPRESS, help=one)
    group = parser.add_argument_group("time, modelled")
    group.add_argument("--gpu", metavar="NAME", help="on which a step of each column is timed, such as a100-80")
    add_time_flags(group.add_argument)
    parser.set_defaults(limit=None, reserve=None)
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="OUT.json", help="every figure of every column; - for stdout")
    group.add_argument("--quiet", "-q", action="store_true", help="no progress and no table")


def main(args: argparse.Namespace) -> int:
    what, columns = _columns(args)
    is_planned = _by_shapes(args, what, columns)
    outcomes = _configs(args, columns, is_planned=is_planned)
    configs = {name: config for name, config in outcomes.items() if isinstance(config, RunConfig)}
    if asked := next(filter(None, (named(config.saving) for config in configs.values())), None):
        why = "compare runs several trainings, and neither saves nor goes on; use zerosim run"
        raise wrong(asked[0], f" {asked[1]!r}: {why}")
    first, cluster = next(iter(configs.values())), device_cluster(args, device_limit(args, None))
    with one_voice(first.world.transport) as is_first:  # the first process writes for all
        figures = output(args, "json", *configs.values(), also=filter(None, [args.other])) if is_first else None
        from zerosim.report.compare import Comparison
        from zerosim.report.compare_rows import Column

        for name, config in configs.items():
            limit = device_limit(args, config.memory.capacity if is_planned else None)
            over = _over_links(config) if what == "compression" and cluster is None else {}
            try:
                if is_planned:
                    found: Planned | RunResult = plan_on(config.replace(capacity=None), limit, cluster=cluster)
                else:
                    found = trained(name if what != "stage" else "", config, args, cluster)
                outcomes[name] = Column(found, limit, cluster, over)
            except OutOfMemory as error:
                outcomes[name] = error
            except InputError as error:  # of a plan; no other process may wait for the next run of this one
                if not is_planned:
                    raise
                outcomes[name] = error
        _refuse(outcomes, need_all=what == "file")
        changes = _changes(outcomes, [args.scenario, args.other], is_planned) if what == "file" else None
        why = f"To train {first.model.name} here would take too long or too much memory: this is on tensor shapes only."
        page = Comparison(what, outcomes, changes, why if is_planned and not args.shapes and what != "file" else "")
        leave(args, figures, lambda: page.to_dict(_values), lambda: page, after_progress=not is_planned)
    is_full = any(isinstance(error, OutOfMemory) for error in page.failures.values())
    if is_full or (is_planned and what != "file" and page.limit is not None and not page.fitting):
        return OutOfMemory.exit_code
    return DIFFERENCE if page.contradictions else 0


def _columns(args: argparse.Namespace) -> tuple[str, dict[str, Flags]]:
    """Return what is compared, and each column's own flags. Raises: InputError for flags that do not go together."""
    given = [flag for flag in AXES if getattr(args, flag) is not None]
    if args.other is not None and given:
        two = f"two were given, {args.scenario} and {args.other}"
        raise InputError(f"--{given[0]}: works only with one scenario, and {two}")
    if args.other is not None:
        return "file", {"A": {"scenario": args.scenario}, "B": {"scenario": args.other}}
    if len(given) > 1:
        other = f"leave --stages out; --{given[1]} compares at one stage, --stage"
        one = other if given[0] == "stages" else "choose one"
        raise InputError(f"--{given[0]} and --{given[1]} are both given: {one}")
    flag = given[0] if given else "stages"
    if flag == "stages" and hasattr(args, "stage"):
        why = f"--stage works only with --{', --'.join([*AXES][1:])}"
        raise InputError(f"--stage {args.stage}: compare takes --stages 0,1,2,3; {why}")
    what = AXES[flag][0]
    columns = {str(name): _flags(what, str(name), args) for name in getattr(args, flag) or (0, 1, 2, 3)}
    for name in ["compress"] if what == "compression" else next(iter(columns.values())):
        if what != "stage" and getattr(args, name, None) is not None:
            raise InputError(f"--{name} and --{flag} are both given: choose one")
    return what, columns


def _flags(what: str, name: str, args: argparse.Namespace) -> Flags:
    """Return a column's own flags. Options that only other columns have are taken back."""
    from zerosim.analysis.candidate import taken_back

    if what == "stage":
        return {**taken_back(key for key, one in OPTIONS.items() if int(name) not in one.stages), "stage": int(name)}
    if what == "precision":
        precision, _, rounding = name.partition(":")
        return {"precision": precision, "rounding": rounding or None}
    if what == "compression":
        return {**taken_back(key for key, of in COMPRESSION_OPTIONS.items() if name not in of), "compress": name}
    if what == "memory":
        stage = run_config(argparse.Namespace(**{**vars(args), "offload": "optimizer=host"})).states_stage
        return {"offload": "" if name == DEVICE else f"optimizer={name}" + f",params={name}" * (stage == 3)}
    return {"fp8" if what == "scaling" else what: name}


def _configs(args: argparse.Namespace, columns: Mapping[str, Flags], *, is_planned: bool) -> dict[str, Any]:
    """Return the configuration of each column, or why it is refused. With --gpu it is that of `zerosim plan` with the
    same flags. Raises: InputError, if all are refused."""
    args.limit = getattr(args, "capacity", None) if is_planned else None
    build, found = planned_config if is_planned or device_of(args) else run_config, dict[str, Any]()
    for name, flags in columns.items():
        values = {key: value for key, value in {**vars(args), **flags}.items() if key != "reading"}
        try:
            config = build(argparse.Namespace(**values))
            found[name] = config if is_planned else check_processes(config)
        except InputError as error:
            found[name] = error
    _refuse(found)
    return found


def _refuse(outcomes: Mapping[str, Any], *, need_all: bool = False) -> None:
    """Raise the first InputError, if all columns have one or `need_all`."""
    errors = [error for error in outcomes.values() if isinstance(error, InputError)]
    if len(errors) == len(outcomes) or (errors and need_all):
        raise errors[0]


def _by_shapes(args: argparse.Namespace, what: str, columns: Mapping[str, Flags]) -> bool:
    """Return whether to plan: as --shapes says, else for two files, and where training would take too long here.

    Raises: InputError for --shapes beside a flag of a run that trains.
    """
    training = [name for name in NEEDS_TRAINING if hasattr(args, name)]
    if args.shapes and training:
        raise InputError(f"{flag_of(training[0])}: works only in training; leave it out, or --shapes")
    if args.shapes is not None or training or what == "file":
        return (what == "file" and args.shapes is None) or bool(args.shapes)
    from zerosim.train.machine import is_too_large
    from zerosim.train.run import DEFAULT_STEPS

    runs = [run for run in _configs(args, columns, is_planned=False).values() if isinstance(run, RunConfig)]
    return any(is_too_large(run, (run.optim.steps or DEFAULT_STEPS) * len(runs)) for run in runs)


def trained(title: str, config: RunConfig, args: argparse.Namespace, cluster: Cluster | None) -> RunResult:
    """Train, and show progress. On a cluster a plan adds the step's time: its record equals the run's."""
    from zerosim.train.plan import plan

    if title and not args.quiet:
        print(f"{title}:", file=human_stream(args))
    result = train(config, human_stream(args), quiet=args.quiet)
    if cluster is None:
        return result
    return replace(result, time=plan(config.replace(steps=None, capacity=None), cluster=cluster).time)


def _over_links(config: RunConfig) -> dict[str, float]:
    """Return the seconds of a step over a slow and a fast link between nodes of one A100."""
    from zerosim.report.compare_rows import LINKS
    from zerosim.train.plan import plan

    if (before := steps_until_coded(config.reduction)) is None:
        return {}
    device, on = find_hardware("a100-80"), config.replace(steps=1 + before, capacity=None)
    clusters = {link: cluster_of(device, node_gpus=1, nic_bytes_per_s=rate) for link, rate in LINKS.items()}
    return {link: time.seconds for link, one in clusters.items() if (time := plan(on, cluster=one).time) is not None}


def _changes(outcomes: Mapping[str, Any], paths: list[str], is_planned: bool) -> Changes:
    """Return the settings that differ between two files and, of plans, the effect of each alone."""
    from zerosim.analysis.changes import each_alone, settings, totals
    from zerosim.report.changes import Changes

    a, b = outcomes.values()
    found = settings(a.config, b.config)
    totals_of = lambda config: totals(plan_on(config, a.limit, cluster=a.cluster).result)  # noqa: E731
    each = each_alone(a.config, b.config, found, totals_of) if is_planned else {}
    return Changes(found, totals(a.result), totals(b.result), each, paths)


def _values(column: Column) -> dict[str, Any]:
    if column.result.losses:
        return column.result.to_dict()
    return plan_values(column.result, column.limit, column.plan.fits(column.limit), None, column.cluster)


def names_of(what: str, known: Collection[str], text: str) -> tuple[str, ...]:
    """Parse 'adam,lion': known names with commas between, each once. Raises: ArgumentTypeError with the nearest for an
    unknown one."""

    def meant(word: str) -> str:
        if name := known_word(word, known):
            return name
        near = nearest(word.strip(), known, "zerosim run --help-all")
        raise argparse.ArgumentTypeError(f"unknown {what} {word.strip()!r}{near}")

    return tuple(dict.fromkeys(map(meant, text.split(","))))
