"""`zerosim grade`: the answers in a file that is handed in, graded. 0: all are solved; 7: not all."""

from __future__ import annotations

import argparse
import sys

from zerosim.cli.outputs import as_json, human_stream, output, written
from zerosim.cli.parser import Parser
from zerosim.errors import UNSOLVED, InputError


def add_arguments(parser: Parser) -> None:
    parser.epilog = (
        "Each answer runs in a process, a temporary folder and an environment of its own, with limits of memory and "
        "time. That is no sandbox: grade strangers' code in a container."
    )
    parser.add_argument("file", metavar="FILE.py|NOTEBOOK.ipynb", nargs="?", help="every answer in it is graded")
    parser.add_argument("--class", dest="folder", metavar="DIR", help="every file of a folder, as CSV on stdout")
    parser.add_argument("--exercise", metavar="NAME", help="this exercise alone")
    parser.add_argument("--path", metavar="NAME", help="also a path's score of 100: hour, day or weeks")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the variant that was set (default: 0)")
    parser.add_argument("--similar", action="store_true", help="for instructors: likeness to zerosim and to solutions")
    parser.add_argument("--published", metavar="DIR", help="published solutions (default: a checkout's)")
    parser.add_argument("--verbose", "-v", action="store_true", help="every check in full")
    parser.add_argument("--json", metavar="OUT.json", help="every check; - for stdout")
    parser.add_argument("--gradescope", metavar="OUT.json", help="results as Gradescope's autograder reads them")


def main(args: argparse.Namespace) -> int:
    from zerosim.grading.catalogue import EXERCISES, find_exercise
    from zerosim.grading.classroom import class_table
    from zerosim.grading.handin import graded, read
    from zerosim.grading.paths import FULL, find_path, number
    from zerosim.grading.report import brief
    from zerosim.grading.results import gradescope, values
    from zerosim.grading.similar import hand_in_parts, likenesses, own_parts, published_parts
    from zerosim.grading.variants import variant

    if (args.file is None) == (args.folder is None):
        raise InputError("expected one of FILE and --class DIR: zerosim grade hw.py, or zerosim grade --class hand_ins")
    wanted = find_exercise(args.exercise) if args.exercise else None
    path = find_path(args.path) if args.path else None
    if args.folder is not None:
        if args.json or args.gradescope:
            raise InputError("--class writes CSV on stdout: leave out --json and --gradescope")
        variant(EXERCISES[0], args.seed)
        sys.stdout.write(class_table(args.folder, wanted, args.seed, args.published, path))
        return 0
    hand_in = read(args.file, wanted)
    for one in hand_in.exercises:
        variant(one, args.seed)
    likely = list[str]()
    if args.similar or args.published:
        mine = hand_in_parts(hand_in.source, hand_in.exercises, args.file)
        likely = likenesses(mine, (own_parts(), published_parts(args.published))) or ["nothing"]
    figures = output(args, "json", also=[args.file])
    scores = output(args, "gradescope", also=[args.file], apart=figures if args.json != "-" else None)
    grades = graded(hand_in, args.seed)
    stream, rows = human_stream(args), values(hand_in, grades, args.seed, path)
    with written((figures, as_json(lambda: rows)), (scores, as_json(lambda: gradescope(grades, path)))):
        if hand_in.magics:
            print(f"skipped: {', '.join(hand_in.magics)}", file=stream)
        for grade in grades:
            print(grade if args.verbose else brief(grade), file=stream)
        if path:
            print(f"{path.title}: {number(path.total(grades))} of {FULL}", file=stream)
        if likely:
            print(f"similar, for instructors: {'; '.join(likely)}", file=stream)
    return 0 if all(grade.passed for grade in grades) else UNSOLVED
