"""Every sentence that zerosim says: in strings, docstrings, comments, pages and lessons."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Sentence(NamedTuple):
    """`room` is 'printed', 'docstring', 'comment', 'page' or 'lesson'; `place` is a file and a line or cell."""

    room: str
    place: str
    text: str


def sentences() -> Iterator[Sentence]:
    """Yield all of them, file by file."""
    for path in sorted((ROOT / "zerosim").rglob("*.py")):
        yield from of_code(path)
    yield from of_exercises(ROOT / "zerosim/grading/given/exercises.toml")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        yield from of_page(path)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        yield from of_lesson(path)


def of_code(path: Path) -> Iterator[Sentence]:
    """Yield the docstrings, comments and printed strings of a module."""
    source, name = path.read_text("utf-8"), path.relative_to(ROOT).as_posix()
    tree = ast.parse(source)
    docs = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for one in body if isinstance(body, list) else ():
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                docs.add(one.value)
                yield from _cut("docstring", f"{name}:{one.lineno}", one.value.value)
    within = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield from _cut("printed", f"{name}:{node.lineno}", _shown(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_printed = node not in docs and id(node) not in within and "__global__" not in node.value
            if is_printed and not node.value.lstrip().startswith("//"):
                yield from _cut("printed", f"{name}:{node.lineno}", node.value)
    comment, first = "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            first = first if comment else token.start[0]
            comment += " " + token.string.lstrip("# ")
        elif comment and token.type not in (tokenize.NL, tokenize.NEWLINE):
            yield from _cut("comment", f"{name}:{first}", comment)
            comment = ""


def of_exercises(path: Path) -> Iterator[Sentence]:
    """Yield the sentences of the exercises' texts."""
    for name, row in tomllib.loads(path.read_text("utf-8")).items():
        for text in (value for value in row.values() if isinstance(value, str)) if isinstance(row, dict) else ():
            yield from _cut("printed", f"{path.relative_to(ROOT).as_posix()} {name}", text)


def _shown(node: ast.JoinedStr) -> str:
    """Return an f-string with its values as braces."""
    return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)


def of_page(path: Path) -> Iterator[Sentence]:
    """Yield the sentences of a page, without code blocks, tables and headings."""
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "#"))]
    yield from _cut("page", path.relative_to(ROOT).as_posix(), "\n".join(lines))


def of_lesson(path: Path) -> Iterator[Sentence]:
    """Yield the sentences of a notebook's text."""
    for number, cell in enumerate(json.loads(path.read_text("utf-8"))["cells"]):
        if cell["cell_type"] == "markdown":
            text = re.sub(r"```.*?```", "", "".join(cell["source"]), flags=re.DOTALL)
            lines = [line for line in text.splitlines() if not line.startswith(("|", "#", "<"))]
            yield from _cut("lesson", f"{path.relative_to(ROOT).as_posix()} cell {number}", "\n".join(lines))


def _cut(room: str, place: str, text: str) -> Iterator[Sentence]:
    """Cut a text at ends of sentences and of paragraphs; fewer than four words are no sentence."""
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*] |\n {4,}", text):
        for one in re.split(r"(?<=[.?!])\s+(?=[A-Z`*\"(])", " ".join(paragraph.split())):
            if len(re.findall(r"[A-Za-z]{2,}", one)) >= 4:
                yield Sentence(room, place, one)
