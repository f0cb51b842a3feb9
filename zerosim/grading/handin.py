"""A handed-in file, a script or a notebook: the answers in it, and the grade of each.

The file is read, never imported here. An answer's code runs in the answer's process (`handin_code.py`), in a folder and
an environment of its own.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from zerosim.config.inputs import open_file
from zerosim.errors import InputError, printable
from zerosim.grading.catalogue import EXERCISES
from zerosim.grading.exercise import Exercise
from zerosim.grading.handin_code import defined, parsed
from zerosim.grading.process import judged_source
from zerosim.grading.report import Grade
from zerosim.grading.variants import variant

_MAGIC = re.compile(r"\s*([%!?]|[\w, ]+=\s*[%!]|[\w.]+\?\??\s*$)")
MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class HandIn:
    """A file's text as Python, the exercises that it answers, and the skipped parts of a notebook: its magics, and
    cells that are not Python."""

    path: str
    source: str
    skipped: tuple[str, ...]
    exercises: tuple[Exercise, ...]
    seed: int = 0


def read(path: str, wanted: Exercise | None = None, seed: int = 0) -> HandIn:
    """Read a hand-in, and find the exercises that it answers, as the seed has them.

    Raises: InputError for a file that cannot be read, is broken, or holds no answer; for a seed out of range.
    """
    exercises = [variant(one, seed) for one in EXERCISES if wanted is None or one.name == wanted.name]
    source, skipped = _text(path)
    if why := _broken(source):
        raise InputError(f"{path}{why}")
    tree = parsed(source)
    there = {name for node in tree.body for name in defined(node)}
    found = tuple(one for one in exercises if one.given.__name__ in there)
    if not found:
        what = f"{wanted.given.__name__} (exercise {wanted.name})" if wanted else "MyZero2 (exercise zero2)"
        broken = next((f"; {words}" for words in skipped if words.startswith("code cell")), "")
        raise InputError(
            f"{path}: contains no answer; expected a class or function such as {what} (zerosim homework NAME writes "
            "one)" + broken
        )
    return HandIn(path, source, skipped, found, seed)


def graded(hand_in: HandIn) -> list[Grade]:
    """Grade each answer in a file."""
    name = Path(hand_in.path).name
    return [Grade(one, judged_source(name, hand_in.source, one, hand_in.seed)) for one in hand_in.exercises]


def _text(path: str) -> tuple[str, tuple[str, ...]]:
    """Return the Python of a script or of a notebook's cells, and the skipped parts."""
    if os.path.isdir(path):
        raise InputError(f"{path}: is a folder; zerosim grade --class {path} grades every file in it")
    with open_file(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise InputError(f"{path}: larger than {MOST_BYTES >> 20} MiB; hand in only code, without outputs")
    marks = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16: "utf-16"}
    marks |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # as PowerShell's > writes
    try:
        text = data.decode(next((name for mark, name in marks.items() if data.startswith(mark)), "utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not {error.encoding.upper()} text; save it as UTF-8") from None
    return _of_cells(path, text) if path.endswith(".ipynb") else (text, ())


def _of_cells(path: str, text: str) -> tuple[str, tuple[str, ...]]:
    try:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path}: is not a notebook; expected JSON with cells, as Jupyter writes it") from None
    lines, skipped = list[str](), list[str]()
    for number, source in enumerate(sources, 1):
        cell, left_out = _of_cell(source, number)
        lines += cell
        skipped += left_out
    return "\n".join(lines) + "\n", tuple(map(printable, skipped))


def _of_cell(source: str, number: int) -> tuple[list[str], list[str]]:
    """Return the lines of a cell as Python, as many as it has, and its skipped parts."""
    lines, magics = source.splitlines(), list[str]()
    if not _broken(source):  # a line that begins with % may continue the one before
        return lines, []
    if source.lstrip().startswith("%%"):
        return [""] * len(lines), [source.lstrip().splitlines()[0]]
    for at, line in enumerate(lines):
        if _MAGIC.match(line):
            magics.append(line.strip())
            lines[at] = f"{line[: len(line) - len(line.lstrip())]}pass"
    if why := _broken("\n".join(lines)):
        return [""] * len(lines), [*magics, f"code cell {number}{why}"]
    return lines, magics


def _broken(source: str) -> str:
    """Return why text is not Python, with the line; '' if it is."""
    try:
        parsed(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        return f"{f', line {line}' if line else ''}: is not Python: {getattr(error, 'msg', error)}"
    return ""
