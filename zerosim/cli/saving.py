"""The flags of a planned save: a plan writes nothing, so --save-state has no folder there."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from zerosim.cli.options import add_flag
from zerosim.cli.parser import Parser, size
from zerosim.config import OPTIONS
from zerosim.config.parts.saving import SHARDED
from zerosim.errors import InputError

SHARDS = "--save-as sharded, which gathers nothing"
"""What fits where a gathered save does not."""


def add_save_flags(parser: Parser) -> None:
    """Add --save-state, --save-as, --mtbf and --drive-rate."""
    add = parser.add_argument_group("checkpoints").add_argument
    add(
        "--save-state", action="store_true", dest="saves_state",
        help="also count a save of the run's state after the step, and say how often to save; a plan writes no file",
    )  # fmt: skip
    for name in ("save_as", "mtbf"):
        add_flag(add, OPTIONS[name])
    add(
        "--drive-rate", metavar="SIZE", type=size,
        help="bytes per second that all drives of a node write together, such as 25GB (default: --node's)",
    )  # fmt: skip


def settle_saves(args: argparse.Namespace, scenario: Mapping[str, Any]) -> None:
    """Let --save-state save shards, unless --save-as or the scenario says how. Raises: InputError for --mtbf without a
    save."""
    if {"save_as", "save_state"} & (vars(args).keys() | scenario.keys()):
        return
    if args.saves_state:
        args.save_as = SHARDED
    elif hasattr(args, "mtbf"):
        raise InputError(f"--mtbf {args.mtbf:g}: says how often to save; pass --save-state too", field="mtbf")
