"""Write the course into a student's own folder: notebooks, scenarios, exercises as files, and a starting page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zerosim.errors import InputError, OutputError
from zerosim.grading.catalogue import EXERCISES
from zerosim.grading.homework import skeleton
from zerosim.lessons.course import KINDS, Way, course, exercise_minutes, material, project_url
from zerosim.lessons.opening import away, opened

START = "START.md"
_PART = ".part"
"""The end of a file's name while it is written."""

_WORDS = {"hour": "one hour", "day": "one day", "weeks": "two weeks"}


def write_course(folder: Path) -> list[Path]:
    """Write all files of the course, and return their paths. No file is overwritten. What an earlier call wrote before
    it was interrupted is completed.

    Raises: InputError for a folder that holds anything else; OutputError where a file cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; choose a new or empty folder")
    files = {name: text.encode() for name, text in contents().items()}
    if not all(_is_ours(path, path.relative_to(folder).as_posix(), files) for path in folder.rglob("*")):
        raise InputError(f"{folder}: is not empty, and zerosim does not overwrite files; choose a new folder")
    try:
        for name, data in files.items():
            path = folder / name
            if path.exists():  # written by an earlier call
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name + _PART)
            part.write_bytes(data)
            part.replace(path)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror or error}") from None
    return [folder / name for name in files]


def _is_ours(path: Path, name: str, files: Mapping[str, bytes]) -> bool:
    """Return whether this is a file of the course, whole or the beginning of one, or a folder for such files."""
    if path.is_symlink():
        return False
    if path.is_dir():
        return any(file.startswith(f"{name}/") for file in files)
    data = files.get(name.removesuffix(_PART))
    if data is None or not path.is_file() or path.stat().st_size > len(data):
        return False
    return data.startswith(path.read_bytes()) if name.endswith(_PART) else data == path.read_bytes()


def contents() -> dict[str, str]:
    """Make the course's files, by their path in a student's folder; the page to begin with is the last.

    Raises: InputError for an incomplete installation.
    """
    url, notebooks, scenarios = project_url(), material("notebooks"), material("scenarios")
    files = dict[str, str]()
    for lesson in course().lessons:
        path = notebooks / f"{lesson.file}.ipynb"
        if not path.is_file():
            raise InputError(f"{path} is missing: install zerosim again, from a wheel or a whole checkout")
        files[path.name] = away(opened(path.read_text("utf-8"), lesson, url), url)
    for path in sorted(scenarios.rglob("*.toml")):
        files[f"scenarios/{path.relative_to(scenarios).as_posix()}"] = path.read_text("utf-8")
    for one in EXERCISES:
        files[f"homework/{one.number:02}_{one.name}.py"] = skeleton(one)
    files[START] = start()
    return files


def start() -> str:
    """Write the page that a student reads first: the paths in minutes, the lessons, how an answer is graded.

    It is `START.md` in a student's folder and `notebooks/README.md` in the repository.
    """
    lines = [
        "# The course: start here",
        "",
        "Run `jupyter lab` in this folder. It comes with `pip install jupyterlab`. `zerosim course DIR` writes such a",
        "folder: notebooks, scenarios, and every exercise as a file in `homework`.",
        "",
        "Begin with the path of one hour, or with 03. 01 and 02 come first by number because others build on them.",
        "Read them when a lesson needs them.",
        "",
        "An exercise's number is that of its file: exercise 3 is `homework/03_ddp.py`, in notebook 04. Numbers do not",
        "follow the notebooks (exercise 1 stands in 05). Each notebook and the tables below have the order to take.",
        "",
        "An answer is graded in the notebook that asks for it, or as a file: `zerosim grade homework/03_ddp.py`.",
        "`zerosim homework ddp -o hw.py` writes one alone. The code has guards for Windows and macOS, but was tried on",
        "Linux only.",
        "",
        "Minutes are estimates. They were not measured with students.",
        "",
    ]
    for way in course().ways:
        lines += [f"## A path of {_WORDS[way.name]}: {_span(way.minutes)}", "", *path_rows(way), ""]
        lines += [way.note, ""] if way.note else []
    lines += ["## All notebooks", "", "| | minutes | | needs |", "|---|---|---|---|"]
    for lesson in course().lessons:
        needs = ", ".join(lesson.needs)
        lines.append(f"| [{lesson.file}]({lesson.file}.ipynb) | {lesson.minutes} | {KINDS[lesson.kind]} | {needs} |")
    return "\n".join(lines) + "\n"


def path_rows(way: Way) -> list[str]:
    """Write a path as a table: each lesson with its minutes and its exercises on this path."""
    lines = ["| notebook | minutes | its exercises on this path | minutes |", "|---|---|---|---|"]
    left = list(way.exercises)
    for part in way.parts:
        own = [name for name in part.lesson.exercises if name in left]
        left = [name for name in left if name not in own]
        where = f"[{part.lesson.file}]({part.lesson.file}.ipynb)" + (f", {part.part}" if part.part else "")
        lines.append(f"| {where} | {part.minutes} | {', '.join(own)} | {sum(map(exercise_minutes, own)) or ''} |")
    if left:
        lines.append(f"| files in `homework` | | {', '.join(left)} | {sum(map(exercise_minutes, left))} |")
    return lines


def _span(minutes: int) -> str:
    return f"{minutes} minutes" if minutes <= 60 else f"{minutes / 60:.1f} hours".replace(".0 ", " ")
