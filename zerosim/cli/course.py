"""`zerosim course`: write the course into a folder, or run all notebooks of such a folder."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from zerosim.cli.parser import Parser
from zerosim.errors import DIFFERENCE, InputError

SECONDS = 60.0


def add_arguments(parser: Parser) -> None:
    parser.add_argument("folder", metavar="DIR", help="a new or empty folder for notebooks, scenarios and exercises")
    parser.add_argument(
        "--check",
        action="store_true",
        help="run every notebook of DIR; the files stay as they are",
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="S", help=f"most seconds of a notebook (default: {SECONDS:g})"
    )


def main(args: argparse.Namespace) -> int:
    from zerosim.lessons.executing import check_jupyter
    from zerosim.lessons.handing_out import START, write_course

    folder = Path(args.folder)
    if not 0 < args.seconds < math.inf:
        raise InputError(f"--seconds {args.seconds:g}: expected a number above 0, such as {SECONDS:g}")
    if args.check:
        check_jupyter()
    if args.check and (folder / START).is_file():
        return check(folder, args.seconds)
    files = write_course(folder)
    notebooks = sum(path.suffix == ".ipynb" for path in files)
    print(f"{folder}: {notebooks} notebooks and {len(files) - notebooks} other files. Begin with {folder / START}.")
    print(f"To open them: jupyter lab {folder}")
    return check(folder, args.seconds) if args.check else 0


def check(folder: Path, seconds: float) -> int:
    """Run the notebooks of a folder. Return 0 if all of them ended well."""
    from zerosim.lessons.executing import NotebookFailed, executed

    paths = [path for path in sorted(folder.glob("*.ipynb")) if path.is_file()]
    if not paths:
        raise InputError(f"{folder}: contains no notebook; write the course with: zerosim course DIR")
    failed = 0
    for path in paths:
        try:
            said = f"{executed(path.resolve(), seconds)[1]:5.1f} s"
        except NotebookFailed as failure:
            failed += 1
            said = f"fails: {failure}"
        print(f"{path.stem:36}{said}", flush=True)
    print(f"{len(paths) - failed} of {len(paths)} notebooks ran to their end.")
    return DIFFERENCE if failed else 0
