"""The flags of a run, and the RunConfig built from them and a scenario file.

Every flag is a field of a part of `RunConfig`, which declares its type, help, default and heading.
Only flags that were given override the scenario. `RunConfig` checks values; an error names the flag or the
file of the bad value.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from zerosim.cli.auto import resolved
from zerosim.cli.files import add_file_flags, file_values, reading_of
from zerosim.cli.parser import (
    Parser,
    count,
    dynamic_or_number,
    flag_of,
    number,
    or_none,
    size,
    utf8,
    whole_number,
)
from zerosim.config import OPTIONS, PLAN_DEFAULTS, WITH_VALUES, Option, RunConfig
from zerosim.config.launcher import is_launched, mpirun_size, size_name
from zerosim.config.parts.clock import CLOCK
from zerosim.errors import InputError
from zerosim.units import parse_bytes, parse_count

GROUPS = (
    *("ranks and stage", "pipeline", "model", "activations", "recipe", "ZeRO++ and MiCS", "offload", "training"),
    *("experts", "what is trained", "precision", "data and weights", "checkpoints"),
)
"""Headings of a verb's help, in order; others follow them. Options of the clock are in verbs with a clock."""

_PLANNED = {
    "accumulate": "1; with --pp P 4P",
    "attention": "eager; with --gpu or --limit flash",
    "recipe": "paper; usual with --gpu, paper with several stages",
}
"""Defaults of a plan that depend on other flags, as text."""

MOST_TIMES = 64
"""How many numbers of ranks are tried where none is given."""
_LONGEST_CHOICES = 44  # letters: a longer placeholder goes into the help text
_CONVERT: Mapping[Any, Callable[[str], Any]] = {
    "sample": utf8,
    "loss_scale": or_none(dynamic_or_number),
    "clip_norm": lambda word: or_none(number)(word) or 0.0,  # none undoes a recipe's clipping too
    parse_bytes: or_none(size),
    parse_count: count,
    "int": whole_number,
    "float": number,
    "str": str,
    "tuple[float, float]": number,
}
"""The parser of a word: by the option's name, by its text form, or by its type."""


def add_run_flags(parser: Parser, *, stage: bool = True, planning: bool = False, beside: bool = True) -> None:
    """Add every field of RunConfig as a flag; `stage` separately, for verbs that run several ZeRO stages.

    Flags of the clock are beside --gpu (`plan.add_time_flags`), in verbs with a clock.
    `beside`: whether a second file may belong to the first. With `planning`, use a plan's defaults, and leave out
    flags that need values (files, a sample) or threads.
    """
    defaults = {**PLAN_DEFAULTS, "steps": 1, "bucket_bytes": "none", **_PLANNED} if planning else {}
    left_out = {*(WITH_VALUES.split() if planning else ()), *(() if stage else ("stage",))}
    file = (
        "a run's values; flags override them. Also a file of another framework: ds_config.json, an accelerate YAML ..."
    )
    parser.add_argument("scenario", nargs="?", metavar="FILE", help=file)
    if beside:
        parser.add_argument("beside", nargs="?", metavar="FILE2", help="another framework's file that belongs to it")
    add_file_flags(parser)
    for title, options in options_by_group().items():
        if shown := [option for option in options if option.flat not in left_out]:
            add = parser.add_argument_group(title).add_argument
            for option in shown:
                add_flag(add, option, defaults)


def options_by_group() -> dict[str, list[Option]]:
    """Return the options under each heading, without the clock's: in the order of parts, except where an option says
    which one it stands behind."""
    found: dict[str, list[Option]] = {title: [] for title in GROUPS}
    for option in sorted(OPTIONS.values(), key=lambda option: bool(option.after)):
        if option.flat not in CLOCK:
            group = found.setdefault(option.group, [])
            names = [one.flat for one in group]
            behind = names.index(option.after) + 1 if option.after in names else 0
            group.insert(behind if option.after else len(group), option)
    return found


def add_flag(add: Callable[..., Any], option: Option, defaults: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Add the flag of one field. A missing flag leaves the field unset."""
    common = {"dest": option.flat, "default": argparse.SUPPRESS}
    if option.kinds[0] == "bool":
        state = option.shown or ("on" if option.default else "off")
        help = f"{option.help} (default: {state})"
        names = flag_of(option.flat), *option.also
        add(*names, help=help, action=argparse.BooleanOptionalAction, **common)
        return
    default = defaults.get(option.flat, option.default if option.shown is None else option.shown)
    value, words = "|".join(option.choices) or option.metavar, option.help
    if len(value) > _LONGEST_CHOICES:
        value, words = "NAME", f"{words}: {', '.join(option.choices)}"
    add(
        flag_of(option.flat),
        *option.also,
        metavar=value,
        help=f"{words} (default: {default})".replace("%", "%%"),
        type=next(_CONVERT[key] for key in (option.flat, option.parse, option.kinds[0]) if key in _CONVERT),
        nargs=2 if isinstance(option.metavar, tuple) else None,
        **common,
    )


def scenario_values(args: argparse.Namespace, *, any_ranks: bool = False) -> dict[str, Any]:
    """Return the values of the named file; none without one. Raises: InputError for a bad file."""
    if (reading := reading_of(args)) is not None:
        return file_values(args, reading, any_ranks=any_ranks)
    if args.scenario is None:
        return {}
    from zerosim.config import read_scenario

    return read_scenario(args.scenario)


def run_config(
    args: argparse.Namespace,
    defaults: Mapping[str, Any] | None = None,
    *,
    any_ranks: bool = False,
    scenario: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Build the configuration: a verb's `defaults`, then the scenario's values, then the given flags.

    `scenario`: its values, if already read. `any_ranks`: without --ranks, take as few ranks as the mesh
    needs, or more if another option does.

    Raises: InputError that names the flag or the scenario with the bad value.
    """
    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    path = args.scenario
    scenario = scenario_values(args, any_ranks=any_ranks) if scenario is None else scenario
    values = {**(defaults or {}), **scenario, **given}
    build = partial(RunConfig.from_dict, source=f"scenario {path}")
    try:
        return _on_few_ranks(values, build) if any_ranks and "ranks" not in values else build(values)
    except InputError as error:
        where = f" ({error.beside} is the scenario's, {path})" if error.beside in scenario.keys() - given else ""
        if error.field in given:
            raise InputError(f"{error.called(flag_of(error.field))}{where}", field=error.field) from None
        if error.field in scenario:
            where = f" ({flag_of(error.beside)} was given)" if error.beside in given else ""
            key = f"scenario {path}" if (read := reading_of(args)) is None else f"{path}: {read.sources[error.field]}"
            raise InputError(f"{key}: {error}{where}", field=error.field) from None
        raise


def _on_few_ranks(values: Mapping[str, Any], build: Callable[[Mapping[str, Any]], RunConfig]) -> RunConfig:
    """Build the configuration on the ranks of its mesh's other axes, or on the fewest multiple that nothing refuses.

    Raises: InputError, the first refusal.
    """
    sizes = [size for axis in ("dp_replicate", "tp", "pp") if (size := values.get(axis)) is not None]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return build(values)
    each, usual, refusal = math.prod(sizes), OPTIONS["ranks"].default, None
    most = int(OPTIONS["ranks"].high or usual)
    for ranks in (each if sizes else usual, *range(each, MOST_TIMES * each + 1, each)):
        try:
            return build({**values, "ranks": min(ranks, most)})
        except InputError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def training_config(args: argparse.Namespace) -> RunConfig:
    """Build `run_config` for a verb that trains. Raises: InputError as `run_config` and `check_processes` do."""
    return check_processes(resolved(args, run_config(args)))


def check_processes(config: RunConfig) -> RunConfig:
    """Return the configuration. Raises: InputError if each process of mpirun would train all ranks."""
    processes = mpirun_size() or 1
    if config.world.transport == "threads" and processes > 1 and is_launched():
        raise InputError(
            f"mpirun started {processes} processes, and each would train all {config.mesh.ranks} ranks: add --world "
            f"mpi, or start one process. If mpirun did not start this one, unset {size_name()}"
        )
    return config
