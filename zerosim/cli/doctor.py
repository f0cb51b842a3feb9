"""`zerosim doctor`: list what this machine has and lacks, and the commands to install the rest."""

from __future__ import annotations

import argparse

from zerosim.cli.outputs import leave, output
from zerosim.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", metavar="OUT.json", help="all of it; - for stdout")


def main(args: argparse.Namespace) -> int:
    """Report. Always return 0. Raises: InputError for a file that cannot be written."""
    figures = output(args, "json")
    from zerosim.report.doctor import doctor_report
    from zerosim.train.diagnosis import diagnose

    found = diagnose()
    leave(args, figures, found.to_dict, lambda: doctor_report(found))
    return 0
