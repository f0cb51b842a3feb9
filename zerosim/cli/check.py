"""`zerosim check`: compare scenarios' printed figures with counts and formulas.

Every file is read and validated before anything runs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from zerosim.cli.outputs import leave, output
from zerosim.cli.parser import Parser
from zerosim.errors import DIFFERENCE, InputError


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "paths", metavar="FILE.toml|FOLDER", nargs="+", help="scenarios with [expect], or folders of them"
    )
    parser.add_argument("--verbose", "-v", action="store_true", help="show every figure, even with several files")
    parser.add_argument("--json", metavar="OUT.json", help="every figure and verdict; - for stdout")


def main(args: argparse.Namespace) -> int:
    from zerosim.analysis.expect import Runs, judge, read_expectations
    from zerosim.config.files import read_scenario_file
    from zerosim.report.check import CheckedFile, CheckReport

    named, found = scenario_paths(args.paths)
    files = [read_scenario_file(path) for path in found]
    expectations = {file.path: read_expectations(file) for file in files}
    skipped = [path for path, tables in expectations.items() if not tables]
    if bare := next((file.path for file in files if not file.expect and not file.is_run_alone), None):
        raise InputError(
            f"scenario {bare}: it has no [expect], so there is nothing to check; write expect = [] in a file for "
            "zerosim run only"
        )
    if bare := next((path for path in skipped if path in named), None):
        raise InputError(
            f"scenario {bare}: its [expect] is empty, so there is nothing to check; run it with zerosim run {bare}"
        )
    if len(skipped) == len(files):
        raise InputError(f"no [expect] in any scenario of {', '.join(args.paths)}: nothing to check")
    runs_of = [cell.config for tables in expectations.values() for table in tables for cell in table.cells]
    figures = output(args, "json", *runs_of, also=found)

    runs = Runs()
    judged = {path: tuple(judge(table, runs) for table in tables) for path, tables in expectations.items() if tables}
    checked = [CheckedFile(path, tables) for path, tables in judged.items()]
    report = CheckReport(checked, skipped, in_full=args.verbose or len(found) == 1)
    leave(args, figures, report.to_dict, lambda: report)
    return 0 if report.passed else DIFFERENCE


def scenario_paths(words: list[str]) -> tuple[set[str], list[str]]:
    """Return the files named one by one, and all files: a folder stands for its *.toml in order, each file once.

    Raises: InputError for a folder without any.
    """
    named, found = set(), []
    for word in words:
        folder = Path(word)
        if not os.path.isdir(word):
            named.add(word)
            found.append(word)
            continue
        inside = sorted(str(path) for path in folder.glob("*.toml"))
        if not inside:
            raise InputError(f"{word} contains no scenario: expected files ending in .toml")
        found += inside
    return named, list(dict.fromkeys(found))
