"""`zerosim explain`: a run's closed forms with its numbers put in, without a run; or another framework's file.

For a file such as ds_config.json each key is planned with and without it.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zerosim.cli.files import reading_of
from zerosim.cli.options import add_run_flags
from zerosim.cli.outputs import leave, output
from zerosim.cli.parser import Parser, flag_of
from zerosim.cli.plan import add_time_flags, device_cluster, device_of, plan_on, planned_config
from zerosim.config import OPTIONS, RunConfig
from zerosim.config.parts.clock import CLOCK
from zerosim.config.recompute import AUTO
from zerosim.errors import InputError

if TYPE_CHECKING:
    from zerosim.dialects import Reading

CLOCK_FLAGS = ("node", "node_gpus", "nic", *CLOCK)

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "positions", "vocab", "tie_embeddings", "experts")
"""Options of a model with blocks. With any of them `--params` has no meaning."""


def add_arguments(parser: Parser) -> None:
    add_run_flags(parser, planning=True)
    beside = parser.add_argument_group("the device, for a file of another framework")
    beside.add_argument("--gpu", metavar="NAME", help="a GPU (zerosim zoo gpus): with it the seconds of each key too")
    add_time_flags(beside.add_argument)
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="OUT.json", help="every term; - for stdout")


def main(args: argparse.Namespace) -> int:
    if (reading := reading_of(args)) is not None:
        return explain_file(args, reading)
    for name in ("gpu", *CLOCK_FLAGS):
        if getattr(args, name, None) is not None and (name != "gpu" or getattr(args, "recompute", "") != AUTO):
            raise InputError(f"{flag_of(name)}: formulas have no seconds; it works with a file of another framework")
    _check(args)
    if hasattr(args, "params") and not hasattr(args, "model") and args.scenario is None:
        args.model = "flat"
    config = planned_config(args)
    figures = output(args, "json", config)
    from zerosim.report.explain import Explanation

    explanation = Explanation(config)
    leave(args, figures, explanation.to_dict, lambda: explanation)
    return 0


def explain_file(args: argparse.Namespace, reading: Reading) -> int:
    """Say what each key of another framework's file does, planned with and without it."""
    from zerosim.analysis.knobs import knobs
    from zerosim.report.knobs import knobs_page
    from zerosim.report.verdict import Limit
    from zerosim.report.words import headline, model_name

    config = planned_config(args)
    device = device_of(args)
    cluster = device_cluster(args, None if device is None else Limit(device.name, device.memory_bytes, device, None))
    figures = output(args, "json", config)

    def config_without(key: str) -> RunConfig:
        names = [*filter(None, [args.without]), key]
        values = {name: value for name, value in vars(args).items() if name != "reading"}
        return planned_config(argparse.Namespace(**{**values, "without": ",".join(names)}))

    found = knobs(reading, config, config_without, lambda one: plan_on(one, None, cluster=cluster).result)
    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    of = "" if device is None else f" of {device.name}"
    leave(
        args,
        figures,
        lambda: {"schema": 1, "file": reading.to_dict(), "knobs": [one.to_dict() for one in found]},
        lambda: knobs_page(reading, found, given, f"{model_name(config)}: {headline(config, of)}."),
    )
    return 0


def _check(args: argparse.Namespace) -> None:
    """Check the flags. Raises: InputError if the stage, the ranks or the model are missing, or given twice."""
    if args.scenario is None and not hasattr(args, "model"):
        sized = [name for name in SIZES if hasattr(args, name)]
        if hasattr(args, "params") and sized:
            raise InputError(
                f"--params: {flag_of(sized[0])} already determines the number of parameters of a block model; leave "
                f"out --params, or {flag_of(sized[0])}"
            )
        if not hasattr(args, "params") and not sized:
            raise InputError("--params is missing: pass it, --model NAME, sizes, or a scenario")
        missing = [flag_of(name) for name in ("stage", "ranks") if not hasattr(args, name)]
        if missing:
            raise InputError(f"{' and '.join(missing)} missing: a formula needs a ZeRO stage and a number of ranks")
