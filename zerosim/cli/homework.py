"""`zerosim homework`: write an exercise as a file to start from, or list all exercises."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zerosim.cli.outputs import output, written
from zerosim.cli.parser import Parser
from zerosim.errors import InputError, printable


def add_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="an exercise, by name or number; without it all names")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the variant (default: 0, as printed)")
    parser.add_argument("-o", "--output", metavar="FILE.py", help="the file to write (default: stdout)")


def main(args: argparse.Namespace) -> int:
    from zerosim.grading.catalogue import find_exercise
    from zerosim.grading.homework import listed, skeleton

    one = find_exercise(int(args.name) if args.name.isdecimal() else args.name) if args.name else None
    text = listed() if one is None else skeleton(one, args.seed)
    if args.output is None:
        sys.stdout.write(text)
        return 0
    path = Path(args.output)
    if path.is_file() and path.read_bytes() not in (b"", text.encode()):  # a student's work, for all we know
        raise InputError(f"--output {args.output}: exists and has another text; delete it or choose another file")
    with written((output(args, "output"), lambda file: file.write(text.encode()))):
        print(f"wrote {'all names' if one is None else one.name} into {printable(args.output)}")
    return 0
