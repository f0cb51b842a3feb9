"""A folder of hand-ins as a table: a row for each file, a column for each exercise that any of them answers."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import sys

from zerosim.errors import InputError, ZerosimError, printable
from zerosim.grading.exercise import Exercise
from zerosim.grading.handin import graded, read
from zerosim.grading.paths import FULL, Path, number
from zerosim.grading.report import Grade
from zerosim.grading.similar import Part, hand_in_parts, likenesses, own_parts, published_parts

_FORMULA = ("=", "+", "-", "@")


def class_table(
    folder: str, wanted: Exercise | None, seed: int, published: str | None = None, path: Path | None = None
) -> str:
    """Grade a folder's scripts and notebooks, one after the other; return CSV. A broken file is a row that says why.
    The column `similar` is for instructors (`similar.py`); `published` is a folder of solutions.

    Raises: InputError for a folder that cannot be read, or holds no file to grade.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith((".py", ".ipynb")))
    except OSError as error:
        raise InputError(f"--class {folder}: cannot be read: {error.strerror}; pass a folder of hand-ins") from None
    if not names:
        raise InputError(f"--class {folder}: contains no hand-in; expected files ending in .py or .ipynb")
    known = published_parts(published)
    sources = own_parts(), known
    points: dict[str, dict[str, str]] = {}
    score: dict[str, str] = {}
    remarks: dict[str, str] = {}
    parts: dict[str, list[Part]] = {}
    for count, name in enumerate(names, 1):
        if sys.stderr.isatty():
            print(f"{count} of {len(names)}: {printable(name)}", file=sys.stderr)
        grades, remarks[name], parts[name] = _row(os.path.join(folder, name), wanted, seed, known)
        points[name] = {one.exercise.name: f"{one.points}/{one.possible}" for one in grades}
        score[name] = str(number(path.total(grades))) if path and grades else ""
    columns = list(dict.fromkeys(exercise for row in points.values() for exercise in row))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["file", *columns, *([f"{path.title}, of {FULL}"] if path else []), "remarks", "similar"])
    for name in names:
        others = [part for other in names if other != name for part in parts[other]]
        cells = [*(points[name].get(one, "") for one in columns), *([score[name]] if path else [])]
        similar = "; ".join(likenesses(parts[name], (*sources, others)))
        table.writerow([escaped(cell) for cell in (name, *cells, remarks[name], similar)])
    return text.getvalue()


def escaped(cell: str) -> str:
    """Put a quote before a cell that begins like a formula, which a spreadsheet would run; make control characters
    printable."""
    cell = printable(cell)
    return f"'{cell}" if cell.startswith(_FORMULA) else cell


def _row(path: str, wanted: Exercise | None, seed: int, published: list[Part]) -> tuple[list[Grade], str, list[Part]]:
    try:
        hand_in = read(path, wanted, seed)
        with contextlib.redirect_stdout(sys.stderr):  # an answer's output is not part of the table
            grades = graded(hand_in)
    except ZerosimError as error:
        return [], str(error).replace(path, os.path.basename(path)), []
    remarks = [f"{one.exercise.name}: {why}" for one in grades if (why := _why(one))]
    remarks += [f"skipped {words}" for words in hand_in.skipped]
    parts = hand_in_parts(hand_in.source, hand_in.exercises, os.path.basename(path), published)
    return grades, "; ".join(remarks), parts


def _why(grade: Grade) -> str:
    """Return the root cause of a grade below the full one, in a line."""
    if grade.verdict.void or grade.passed:
        return grade.verdict.void
    first = next(iter(grade.failures), None)
    return f"{first.name}: {first.counted}" if first else "not solved yet"
