"""`zerosim homework`: print an exercise as a skeleton file, with its text at the top."""

from __future__ import annotations

import argparse

from zerosim.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="an exercise, by name or number")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the variant (default: 0, as printed)")


def main(args: argparse.Namespace) -> int:
    from zerosim.grading.catalogue import find_exercise
    from zerosim.grading.homework import skeleton

    print(skeleton(find_exercise(int(args.name) if args.name.isdecimal() else args.name), args.seed), end="")
    return 0
