"""`zerosim doctor`: what this machine has and lacks; or what a file of another framework says, without a plan."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zerosim.cli.files import add_file_flags, reading_of
from zerosim.cli.options import add_flag
from zerosim.cli.outputs import leave, output
from zerosim.cli.parser import Parser, flag_of
from zerosim.config import OPTIONS
from zerosim.errors import InputError

if TYPE_CHECKING:
    from zerosim.dialects import Reading

BESIDE = ("model", "ranks", "tp", "pp", "micro_batch", "accumulate", "precision")
"""The flags that say what a file does not."""


def add_arguments(parser: Parser) -> None:
    file = "check this file of another framework, such as ds_config.json, in place of the machine"
    parser.add_argument("scenario", nargs="?", metavar="FILE", help=file)
    parser.add_argument("beside", nargs="?", metavar="FILE2", help="another framework's file that belongs to it")
    add_file_flags(parser)
    group = parser.add_argument_group("what a file does not say")
    for name in BESIDE:
        add_flag(group.add_argument, OPTIONS[name])
    parser.add_argument("--json", metavar="OUT.json", help="all of it; - for stdout")


def main(args: argparse.Namespace) -> int:
    """Report. Return 0, or 2 for a file that its framework or zerosim refuses. Raises: InputError for a file that
    cannot be read or written."""
    if args.scenario is not None:
        if (reading := reading_of(args)) is None:
            raise InputError(f"{args.scenario}: is zerosim's own; zerosim plan {args.scenario} checks it")
        return check_file(args, reading)
    for name in ("launcher", "read_as", "without", *BESIDE):
        if getattr(args, name, None) is not None:
            raise InputError(f"{flag_of(name)}: works only with a file of another framework")
    figures = output(args, "json")
    from zerosim.report.doctor import doctor_report
    from zerosim.train.diagnosis import diagnose

    found = diagnose()
    leave(args, figures, found.to_dict, lambda: doctor_report(found))
    return 0


def check_file(args: argparse.Namespace, reading: Reading) -> int:
    """Show what became of every key. Return 2 if a plan of it would be refused."""
    figures = output(args, "json")
    from zerosim.report.files import check_report

    given = {name: value for name, value in vars(args).items() if name in OPTIONS}
    leave(args, figures, reading.to_dict, lambda: check_report(reading, given))
    return InputError.exit_code if reading.refusals else 0
