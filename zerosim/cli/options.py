"""The flags of a run, and the RunConfig that they and a scenario file make.

Every flag is a field of a part of `RunConfig`, which declares its type, help and default; this module groups them.
Only flags that were given override the scenario. Values are checked by `RunConfig`; an error is given the flag or the
file that a bad one came from.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

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
from zerosim.errors import InputError
from zerosim.units import parse_bytes, parse_count

GROUPS: Mapping[str, str] = {
    "ranks and stage": "stage ranks dp_replicate tp sequence_parallel keep_gathered pad_vocab replica_reduction "
    "partition collective bucket_bytes reshard_after_forward keep_last_unit capacity allocator allocator_conf parallel "
    "backend world ranks_per_process",
    "pipeline": "pp pipeline virtual_stages micro_batch_group stage_layers balance_ends keep_last_inputs",
    "model": "model layers hidden heads kv_heads ffn seq positions vocab tie_embeddings dropout norm_eps rope_base "
    "params units",
    "activations": "recompute partition_activations cpu_checkpointing saves attention fp32_softmax loss",
    "recipe": "recipe transformer_engine gradient_accumulation_fusion overlap grad_reduction compress "
    "reduce_bucket reduce_buffers overlap_reduction allgather_bucket overlap_param_gather grad_buckets "
    "persistent_grads param_dtype_grads own_grads_only grad_sync upcast_grads keep_upcast "
    "sub_group foreach keep_root_units gather persistent_numel cast_shards prefetch prefetch_elements max_live",
    "training": "steps micro_batch accumulate optimizer lr relative_step aux_lr betas eps momentum nesterov "
    "momentum_form scale_parameter weight_decay decay schedule warmup min_lr clip_norm lazy_states seed",
    "precision": "precision rounding grad_dtype master_init loss_scale initial_scale_power loss_scale_window "
    "hysteresis min_loss_scale skip_nonfinite",
    "data and weights": "data tokens weights sample sample_tokens",
}
"""Titles in a verb's help, and the options under each. The clock's are under "time", in verbs that have one."""

_PLANNED = {
    "accumulate": "1; with --pp P 4P",
    "attention": "eager; with --gpu or --limit flash",
    "recipe": "paper; with --gpu usual, of several stages paper",
}
"""Defaults of a plan that depend on other flags, in words."""

_CONVERT: Mapping[Any, Callable[[str], Any]] = {
    "sample": utf8,
    "loss_scale": or_none(dynamic_or_number),
    "clip_norm": or_none(number),
    parse_bytes: or_none(size),
    parse_count: count,
    "int": whole_number,
    "float": number,
    "str": str,
    "tuple[float, float]": number,
}
"""How a word becomes a value: by the option's name, by how it reads text, or by its type."""


def add_run_flags(parser: Parser, *, stage: bool = True, planning: bool = False) -> None:
    """Every field of RunConfig as a flag; `stage` apart, for a verb that runs several stages.

    Those of the clock stand beside --gpu (`plan.add_time_flags`), in verbs that have one.
    With `planning`, a plan's defaults, and without what needs values (files, a sample) or threads.
    """
    defaults = {**PLAN_DEFAULTS, "steps": 1, "bucket_bytes": "none", **_PLANNED} if planning else {}
    left_out = {*(WITH_VALUES.split() if planning else ()), *(() if stage else ("stage",))}
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO.toml", help="a run's values; flags override them")
    for title, names in GROUPS.items():
        if shown := [OPTIONS[name] for name in names.split() if name not in left_out]:
            add = parser.add_argument_group(title).add_argument
            for option in shown:
                add_flag(add, option, defaults)


def add_flag(add: Callable[..., Any], option: Option, defaults: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Add the flag of one field. Without it the field is not given."""
    common = {"dest": option.flat, "default": argparse.SUPPRESS}
    if option.kinds[0] == "bool":
        state = option.shown or ("on" if option.default else "off")
        help = f"{option.help} (default: {state})"
        names = flag_of(option.flat), *option.also
        add(*names, help=help, action=argparse.BooleanOptionalAction, **common)
        return
    default = defaults.get(option.flat, option.default if option.shown is None else option.shown)
    add(
        flag_of(option.flat),
        *option.also,
        metavar="|".join(option.choices) or option.metavar,
        help=f"{option.help} (default: {default})".replace("%", "%%"),
        type=next(_CONVERT[key] for key in (option.flat, option.parse, option.kinds[0]) if key in _CONVERT),
        nargs=2 if isinstance(option.metavar, tuple) else None,
        **common,
    )


def scenario_values(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the scenario that was named; none without one. Raises: InputError for a bad file."""
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
    """`defaults` (a verb's own), the scenario's values over them, and the given flags over both.

    `scenario`: its values, where they were read. `any_ranks`: where no number of ranks is given, as few as the mesh
    takes, which divide any number that is tried.

    Raises: InputError that names the flag or the scenario with the bad value.
    """
    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    path, scenario = args.scenario, scenario_values(args) if scenario is None else scenario
    values = {**(defaults or {}), **scenario, **given}
    sizes = [size for axis in ("dp_replicate", "tp", "pp") if (size := values.get(axis)) is not None]
    if any_ranks and "ranks" not in values and sizes and all(isinstance(size, int) and size > 0 for size in sizes):
        values["ranks"] = min(math.prod(sizes), int(OPTIONS["ranks"].high or 1))
    try:
        return RunConfig.from_dict(values, source=f"scenario {path}")
    except InputError as error:
        where = f" ({error.beside} is the scenario's, {path})" if error.beside in scenario.keys() - given else ""
        if error.field in given:
            raise InputError(f"{error.called(flag_of(error.field))}{where}", field=error.field) from None
        if error.field in scenario:
            where = f" ({flag_of(error.beside)} was given)" if error.beside in given else ""
            raise InputError(f"scenario {path}: {error}{where}", field=error.field) from None
        raise


def training_config(args: argparse.Namespace) -> RunConfig:
    """`run_config` for a verb that trains: not as many times over as mpirun started processes.

    Raises: InputError as `run_config` does.
    """
    config = run_config(args)
    processes = mpirun_size() or 1
    if config.world.transport == "threads" and processes > 1 and is_launched():
        raise InputError(
            f"mpirun started {processes} processes, and each would train all {config.mesh.ranks} ranks: add --world "
            f"mpi, or start one process; where no mpirun did, unset {size_name()}"
        )
    return config
