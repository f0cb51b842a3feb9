"""`zerosim doctor`: what this machine has, what is missing, and the command that mends it."""

from __future__ import annotations

import argparse

from zerosim.cli.outputs import leave, output
from zerosim.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", metavar="OUT.json", help="all of it; - for stdout")


def main(args: argparse.Namespace) -> int:
    """Returns 0 whatever is missing: it reports. Raises: InputError for a file that cannot be written."""
    figures = output(args, "json")
    from zerosim.report.doctor import doctor_report
    from zerosim.train.diagnosis import diagnose

    found = diagnose()
    leave(args, figures, found.to_dict, lambda: doctor_report(found))
    return 0
