"""The handouts: a printed page for each lesson with exercises, and the words of the API that they need.

The words are rows of the notebooks' own tables: all of a lesson, those of the lessons that it needs, and of the full
tables (lesson 11) those that its exercises name. An exercise that asks for a function has its signature.
"""

from __future__ import annotations

import ast
import html
import json
import re
from functools import cache
from typing import NamedTuple

from zerosim.errors import InputError
from zerosim.grading.catalogue import find_exercise
from zerosim.lessons.course import Lesson, course, exercise_minutes, material
from zerosim.lessons.lecture.deck import style
from zerosim.playback.html import document

FULL = "11"
"""The lesson whose tables have every word of a strategy."""
OBJECTS = {"of a flat": "flat.", "of `self.comm`": "self.comm."}
"""By the heads of its tables, what their words are asked of."""
TITLE = "Handouts: a page a lesson"


class Word(NamedTuple):
    """A row of a notebook's table: words of the API, as code, and what they mean."""

    code: str
    meaning: str

    @property
    def names(self) -> set[str]:
        """The words without the object they are asked of, and without arguments."""
        codes = re.findall("`([^`(]*)", self.code)[::2]
        return {re.sub(r"^(self\.comm|self|comm|flat|unit)\.", "", code) for code in codes}

    def is_in(self, text: str) -> bool:
        return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in self.names)


def handouts() -> str:
    """Return the page with all handouts. Raises: InputError for an incomplete installation."""
    lessons = [lesson for lesson in course().lessons if lesson.exercises]
    body = "".join(f'<section class="handout">{_page(lesson)}</section>' for lesson in lessons)
    return document("handouts", TITLE, style(), "", json.dumps({"schema": "zerosim-handouts"}), body)


def _page(lesson: Lesson) -> str:
    exercises = [find_exercise(name) for name in lesson.exercises]
    parts = [
        f"<h1>{lesson.number}. {html.escape(_title(lesson))}</h1>",
        f'<p class="question">{html.escape(lesson.question)}</p>',
    ]
    for one in exercises:
        parts.append(
            f"<h2>Exercise {one.number}. {html.escape(one.title)} <small>{exercise_minutes(one.name)} minutes"
            f"</small></h2><p>{_marked(one.question)}</p>"
        )
        if "NotImplementedError" in one.skeleton:  # else the code is given, with a bug in it
            parts.append(f"<pre>{html.escape(outline(one.skeleton))}</pre>")
    rows = "".join(f"<tr><td>{_marked(word.code)}</td><td>{_marked(word.meaning)}</td></tr>" for word in words(lesson))
    return "".join(parts) + (f"<h2>The words of the API</h2><table>{rows}</table>" if rows else "")


def words(lesson: Lesson) -> list[Word]:
    """Return the words of the API that a lesson's exercises need."""
    exercises = [find_exercise(name) for name in lesson.exercises]
    texts = " ".join(" ".join((one.skeleton, one.question, *one.hints)) for one in exercises)
    found = _tables(lesson)
    if re.search(r"\((Strategy|Zero[123])\)", texts):
        found += [word for needed in lesson.needs for word in words(course().lesson(needed))]
        texts += " rank "
    elif not re.search(r"\bcomm\b", texts):
        return found
    found = [word for word in _tables(course().lesson(FULL)) if word.is_in(texts)] + found
    shown, kept = set[str](), list[Word]()
    for word in found:
        if not word.names <= shown:
            kept.append(word)
            shown |= word.names
    return kept


@cache
def _cells(lesson: Lesson) -> tuple[str, ...]:
    """Return the texts of a lesson's notebook."""
    path = material("notebooks") / f"{lesson.file}.ipynb"
    if not path.is_file():
        raise InputError(f"{path} is missing: install zerosim again, from a wheel or a whole checkout")
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return tuple("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def _title(lesson: Lesson) -> str:
    """Return a notebook's title, its first heading."""
    return next(
        found[1] for text in _cells(lesson) if (found := re.search(r"^# (?:\d+\.? )?(.*)$", text, re.MULTILINE))
    )


def _tables(lesson: Lesson) -> list[Word]:
    """Return the rows of a notebook's tables whose first cell is words of the API."""
    found, head = list[Word](), ""
    for text in _cells(lesson):
        lines = text.splitlines()
        for line, after in zip(lines, [*lines[1:], ""], strict=False):
            cells = [one.strip() for one in line.strip("|").split("|")]
            if after.startswith("|---"):
                head = cells[0]
            elif line.startswith("| `") and len(cells) == 2 and head != "check":
                found.append(Word(re.sub("`(?!comm)([^`]*)`", rf"`{OBJECTS.get(head, '')}\1`", cells[0]), cells[1]))
    return found


def outline(skeleton: str) -> str:
    """Return the lines of a skeleton that say what to write: classes and functions, without what is given in them."""
    tree = ast.parse(skeleton)
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            header = ast.unparse(node.__class__(**{**vars(node), "body": [ast.Expr(ast.Constant(...))]}))
            lines.append((node.lineno, node.col_offset, header.removesuffix("...").rstrip()))
    return "\n".join(" " * column + header for _, column, header in sorted(lines))


def _marked(text: str) -> str:
    """Return a notebook's text as HTML, its code as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text))
