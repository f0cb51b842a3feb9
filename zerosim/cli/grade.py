"""`zerosim grade`: grade the answers in a file. Exit code 0: all are solved; 7: not all."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, BinaryIO, TextIO

from zerosim.cli.outputs import as_json, human_stream, output, written
from zerosim.cli.parser import Parser
from zerosim.cli.pictures import form_of, no_backend
from zerosim.errors import UNSOLVED, InputError, printable

if TYPE_CHECKING:
    from zerosim.grading.report import Grade


def add_arguments(parser: Parser) -> None:
    parser.epilog = (
        "Each answer runs in a process, a temporary folder and an environment of its own, with limits of memory and "
        "time. That is no sandbox: grade strangers' code in a container."
    )
    parser.add_argument("file", metavar="FILE.py|NOTEBOOK.ipynb", nargs="?", help="the file whose answers are graded")
    parser.add_argument("--class", dest="folder", metavar="DIR", help="every file of a folder, as CSV on stdout")
    parser.add_argument("--exercise", metavar="NAME", help="grade only this exercise")
    parser.add_argument(
        "--path", metavar="NAME", help="also print the score out of 100 on this path: hour, day or weeks"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the assigned variant (default: 0)")
    parser.add_argument(
        "--similar",
        action="store_true",
        help="for instructors: show similarity to zerosim, without the published solution",
    )
    parser.add_argument(
        "--published", metavar="DIR", help="folder of published solutions (default: those of this checkout)"
    )
    parser.add_argument("--verbose", "-v", action="store_true", help="every check in full")
    parser.add_argument("--plot", metavar="OUT.svg", help="the first failed run beside the reference's; or .png")
    parser.add_argument(
        "--html", metavar="OUT.html", help="the same two runs as a page that plays, from the failure's event on"
    )
    parser.add_argument("--json", metavar="OUT.json", help="every check; - for stdout")
    parser.add_argument("--gradescope", metavar="OUT.json", help="results as Gradescope's autograder reads them")


def main(args: argparse.Namespace) -> int:
    from zerosim.grading.catalogue import EXERCISES, find_exercise
    from zerosim.grading.classroom import class_table
    from zerosim.grading.handin import graded, read
    from zerosim.grading.paths import FULL, find_path, number
    from zerosim.grading.report import brief, drawable
    from zerosim.grading.results import gradescope, values
    from zerosim.grading.similar import hand_in_parts, likenesses, own_parts, published_parts
    from zerosim.grading.variants import variant

    if (args.file is None) == (args.folder is None):
        raise InputError("expected either FILE or --class DIR: zerosim grade hw.py, or zerosim grade --class hand_ins")
    wanted = find_exercise(args.exercise) if args.exercise else None
    path = find_path(args.path) if args.path else None
    if args.folder is not None:
        if args.json or args.gradescope or args.plot or args.html:
            raise InputError("--class writes CSV on stdout: leave out --json, --gradescope, --plot and --html")
        variant(EXERCISES[0], args.seed)
        sys.stdout.write(class_table(args.folder, wanted, args.seed, args.published, path))
        return 0
    of = [wanted] if wanted else path.exercises if path else EXERCISES
    figures = output(args, "json", also=[args.file])
    scores = output(args, "gradescope", also=[args.file], apart=[figures if args.json != "-" else None])
    try:
        hand_in = read(args.file, wanted, args.seed)
    except InputError as error:
        if os.path.isfile(args.file):  # a hand-in that cannot be graded has a result, too
            nothing = values(args.file, args.seed, of, [], path=path, why=str(error))
            why = printable(str(error))
            with written((figures, as_json(lambda: nothing)), (scores, as_json(lambda: gradescope(of, [], path, why)))):
                pass
        raise
    likely = list[str]()
    if args.similar or args.published:
        published = published_parts(args.published)
        mine = hand_in_parts(hand_in.source, hand_in.exercises, args.file, published)
        likely = likenesses(mine, (own_parts(), published)) or ["nothing"]
    form = form_of("--plot", args.plot) if args.plot else ""
    for flag, path_given in (("--plot", args.plot), ("--html", args.html)):
        if path_given and not any(one.cases for one in hand_in.exercises):
            names = ", ".join(one.name for one in hand_in.exercises)
            raise InputError(
                f"{flag} {path_given}: {names} runs no training: leave {flag} out, or name another --exercise"
            )
    picture = output(args, "plot", also=[args.file], apart=[figures if args.json != "-" else None, scores])
    before = [figures if args.json != "-" else None, scores, picture]
    web_page = output(args, "html", also=[args.file], apart=before)
    stream = human_stream(args)
    with contextlib.redirect_stdout(stream):  # an answer's output is not part of the JSON
        grades = graded(hand_in)
    chosen, rows = drawable(grades), values(args.file, args.seed, of, grades, skipped=hand_in.skipped, path=path)
    with written(
        (figures, as_json(lambda: rows)),
        (scores, as_json(lambda: gradescope(of, grades, path))),
        (picture if chosen else None, lambda file: _draw(chosen, file, form)),
        (web_page if chosen else None, lambda file: _play(chosen, file)),
    ):
        if hand_in.skipped:
            print(f"skipped: {', '.join(hand_in.skipped)}", file=stream)
        for grade in grades:
            print(_fitted(str(grade) if args.verbose else brief(grade), stream), file=stream)
        if path:
            print(f"{path.title}: {number(path.total(grades))} of {FULL}", file=stream)
        if likely:
            print(f"similar, for instructors: {printable('; '.join(likely))}", file=stream)
        for did, what, path_given in (("drew", "picture", args.plot), ("recorded", "page", args.html)):
            if path_given:
                into = f"{did} {chosen.exercise.name} into {printable(path_given)}" if chosen else ""
                print(into or f"no {what}: no answer's run began", file=stream)
    return 0 if all(grade.passed for grade in grades) else UNSOLVED


def _draw(grade: Grade | None, file: BinaryIO, form: str) -> None:
    with no_backend():
        from zerosim.report.plots.draw import write_chart
    assert grade is not None  # else no output file was requested
    write_chart(grade.plot(), file, form)


def _play(grade: Grade | None, file: BinaryIO) -> None:
    assert grade is not None
    file.write(grade.player().html.encode())


def _fitted(text: str, stream: TextIO) -> str:
    """Wrap long lines on a terminal, with the text's indent; leave them alone in a file or a pipe."""
    if not stream.isatty():
        return text
    width, lines = shutil.get_terminal_size().columns - 1, list[str]()
    for line in text.splitlines():
        indent = re.match(r" *(\[..\] \w+ *|\w+: +)?", line)
        room = len(indent[0]) if indent and line.startswith(" ") and len(indent[0]) < width // 2 else 2
        lines += textwrap.wrap(line, width, subsequent_indent=" " * room, drop_whitespace=True) or [""]
    return "\n".join(lines)
