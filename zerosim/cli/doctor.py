"""`zerosim doctor`: what this machine has, what is missing, and the command that mends it."""

from __future__ import annotations

import argparse
import sys

from zerosim.cli.parser import Parser
from zerosim.cli.run import human_stream, json_text, output, write_json


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", metavar="OUT.json", help="all of it; - for stdout")


def main(args: argparse.Namespace) -> int:
    """Returns 0 whatever is missing: it reports. Raises: InputError for a file that cannot be written."""
    file = output(args, "json")
    from zerosim.report.doctor import doctor_report
    from zerosim.report.look import emit
    from zerosim.train.diagnosis import diagnose

    found = diagnose()
    if file is not None:
        file.write(lambda stream: write_json(stream, found.to_dict()))
    elif args.json is not None:
        sys.stdout.write(json_text(found.to_dict()))
    emit(doctor_report(found), human_stream(args))
    return 0
