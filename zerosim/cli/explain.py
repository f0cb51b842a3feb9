"""`zerosim explain`: a run's closed forms with its numbers put in. It runs and counts nothing."""

from __future__ import annotations

import argparse

from zerosim.cli.options import add_run_flags
from zerosim.cli.outputs import leave, output
from zerosim.cli.parser import Parser, flag_of
from zerosim.cli.plan import planned_config
from zerosim.errors import InputError

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "positions", "vocab", "tie_embeddings", "experts")
"""Options of a model with blocks. With any of them `--params` has no meaning."""


def add_arguments(parser: Parser) -> None:
    add_run_flags(parser, planning=True)
    add = parser.add_argument_group("output").add_argument
    add("--json", metavar="OUT.json", help="every term; - for stdout")


def main(args: argparse.Namespace) -> int:
    _check(args)
    if hasattr(args, "params") and not hasattr(args, "model") and args.scenario is None:
        args.model = "flat"
    config = planned_config(args)
    figures = output(args, "json", config)
    from zerosim.report.explain import Explanation

    explanation = Explanation(config)
    leave(args, figures, explanation.to_dict, lambda: explanation)
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
