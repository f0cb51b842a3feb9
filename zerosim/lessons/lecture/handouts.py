"""The handouts: a printed page for each lesson with exercises, and the words of the API that they need."""

from __future__ import annotations

import ast
import html
import json
import re
import tomllib
from importlib import resources

from zerosim.errors import InputError
from zerosim.grading.catalogue import find_exercise
from zerosim.lessons.course import Lesson, course, exercise_minutes, material
from zerosim.lessons.lecture.deck import style
from zerosim.playback.html import document

TITLE = "Handouts: a page a lesson"


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
    rows = "".join(
        f"<tr><td><code>{html.escape(word)}</code></td><td>{html.escape(meaning)}</td></tr>"
        for word, meaning in words(lesson).items()
    )
    return "".join(parts) + (f"<h2>The words of the API</h2><table>{rows}</table>" if rows else "")


def words(lesson: Lesson) -> dict[str, str]:
    """Return the words of the API that a lesson's exercises need, each with its meaning."""
    file = resources.files("zerosim.grading.given").joinpath("words.toml")
    groups = tomllib.loads(file.read_text("utf-8"))
    needed = dict.fromkeys(group for name in lesson.exercises for group in find_exercise(name).words)
    return {word: meaning for group in needed for word, meaning in groups[group].items()}


def _title(lesson: Lesson) -> str:
    """Return a notebook's title, its first heading. Raises: InputError for an incomplete installation."""
    path = material("notebooks") / f"{lesson.file}.ipynb"
    if not path.is_file():
        raise InputError(f"{path} is missing: install zerosim again, from a wheel or a whole checkout")
    texts = ("".join(cell["source"]) for cell in json.loads(path.read_text("utf-8"))["cells"])
    return next(found[1] for text in texts if (found := re.search(r"^# (?:\d+\.? )?(.*)$", text, re.MULTILINE)))


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
