"""A file that is handed in, a script or a notebook: the answers in it, and the grade of each.

The file is read, never imported here: its imports, definitions and assignments run in the process of the answer
(`process.py`), in a folder and an environment of their own. Other statements are skipped.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path

from zerosim.errors import InputError
from zerosim.grading.catalogue import EXERCISES
from zerosim.grading.exercise import Exercise
from zerosim.grading.process import judged_source
from zerosim.grading.report import Grade

_MAGIC = ("%", "!", "?")
MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class HandIn:
    """A file's text as Python, the magics that were left out of it, and the exercises that it answers."""

    path: str
    source: str
    magics: tuple[str, ...]
    exercises: tuple[Exercise, ...]


def read(path: str, wanted: Exercise | None = None) -> HandIn:
    """Read a hand-in. Raises: InputError for a file that cannot be read, is broken, or holds no answer."""
    source, magics = _text(path)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        raise InputError(f"{path}{where}: is no Python: {getattr(error, 'msg', error)}") from None
    there = {name for node in tree.body for name in _defined(node)}
    found = tuple(one for one in EXERCISES if one.given.__name__ in there and wanted in (None, one))
    if not found:
        what = f"{wanted.given.__name__} (exercise {wanted.name})" if wanted else "MyZero2 (exercise zero2)"
        raise InputError(
            f"{path}: no answer in it: expected a class or function such as {what}; zerosim homework NAME writes one"
        )
    return HandIn(path, source, magics, found)


def graded(hand_in: HandIn, seed: int = 0) -> list[Grade]:
    """The grade of each answer in a file."""
    name = Path(hand_in.path).name
    return [Grade(one, judged_source(name, hand_in.source, one, seed)) for one in hand_in.exercises]


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _text(path: str) -> tuple[str, tuple[str, ...]]:
    """The Python of a script or of a notebook's cells, and the notebook's magics."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise InputError(f"{path}: larger than {MOST_BYTES >> 20} MiB: hand in code alone, without outputs")
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}: expected FILE.py or NOTEBOOK.ipynb") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is no text: expected FILE.py or NOTEBOOK.ipynb") from None
    return _of_cells(path, text) if path.endswith(".ipynb") else (text, ())


def _of_cells(path: str, text: str) -> tuple[str, tuple[str, ...]]:
    try:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path}: is no notebook: expected JSON with cells, as Jupyter writes it") from None
    lines, magics = list[str](), list[str]()
    for source in sources:
        whole = source.lstrip().startswith("%%")
        for line in source.splitlines():
            is_magic = line.lstrip().startswith(_MAGIC)
            if is_magic:
                magics.append(line.strip())
            lines.append(f"{line[: len(line) - len(line.lstrip())]}pass" if is_magic and not whole else
                         "" if whole else line)  # fmt: skip
    return "\n".join(lines) + "\n", tuple(magics)
