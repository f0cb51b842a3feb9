"""The lines at the top of a notebook: its question, its minutes, what it needs, and how to open it.

They are made from the course's row. `python -m zerosim.lessons.opening FOLDER` writes them into a folder's notebooks.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zerosim.errors import InputError
from zerosim.lessons.course import KINDS, Lesson, course, exercise_minutes, project_url

OPEN = "`zerosim course my-course`, then `jupyter lab my-course`"
_BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
_COLAB = "https://colab.research.google.com/github/{}/blob/main/notebooks/{}.ipynb"
_LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)]+)\)")


def opening(lesson: Lesson, url: str | None) -> list[str]:
    """Write the lines below a notebook's title. With a project on GitHub they hold a badge that opens Colab."""
    more = sum(map(exercise_minutes, lesson.exercises))
    count = len(lesson.exercises)
    also = f", and {more} more for {count} exercise{'s' * (count > 1)}" if count else ""
    before = f"Needs {_listed(lesson.needs)}." if lesson.needs else "Needs no earlier notebook."
    kind = "" if lesson.kind == "lesson" else f"{KINDS[lesson.kind].capitalize()}. "
    lines = [f"> **{lesson.question}**", ">", f"> {kind}{lesson.minutes} minutes{also}. {before}", ">"]
    lines.append(f"> To open: {OPEN}, in a terminal. JupyterLab comes with `pip install jupyterlab`.")
    if url is not None and url.startswith("https://github.com/"):
        where = _COLAB.format(url.removeprefix("https://github.com/"), lesson.file)
        lines += [">", f"> [![Open in Colab]({_BADGE})]({where}) There, run `%pip install git+{url}` first."]
    return lines


def _listed(numbers: tuple[str, ...]) -> str:
    *first, last = numbers
    return f"{', '.join(first)} and {last}" if first else last


def opened(text: str, lesson: Lesson, url: str | None) -> str:
    """Put the opening into a notebook's JSON, in the place of an older one."""
    notebook = json.loads(text)
    first = notebook["cells"][0]
    title, *rest = "".join(first["source"]).split("\n")
    while rest and (not rest[0] or rest[0].startswith(">")):
        rest.pop(0)
    _write(first, "\n".join([title, "", *opening(lesson, url), "", *rest]))
    return dumped(notebook)


def away(text: str, url: str | None) -> str:
    """Make links to files of the repository work elsewhere: to the project, or plain words where it has no URL."""
    to = r"[\1]" + f"({url}/blob/main/" + r"\2)" if url else r"\1"
    return with_prose(text, lambda prose: _LINK.sub(to, prose))


def with_prose(text: str, change: Callable[[str], str]) -> str:
    """Change the prose of a notebook's JSON, cell by cell."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            _write(cell, change("".join(cell["source"])))
    return dumped(notebook)


def dumped(notebook: dict[str, Any]) -> str:
    """Write a notebook as Jupyter does."""
    return json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def _write(cell: dict[str, Any], source: str) -> None:
    cell["source"] = source.splitlines(keepends=True)


def main(folder: str) -> None:
    """Write the openings of a folder's notebooks. Raises: InputError for a notebook that has no row."""
    for path in sorted(Path(folder).glob("*.ipynb")):
        try:
            lesson = course().lesson(path.stem)
        except KeyError:
            raise InputError(f"{path.name} has no row in zerosim/lessons/course.toml: add one") from None
        path.write_text(opened(path.read_text("utf-8"), lesson, project_url()), "utf-8", newline="\n")


if __name__ == "__main__":
    main(sys.argv[1])
