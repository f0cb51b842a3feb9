"""The course as a student gets it: rows and notebooks agree, nothing is written over, links work anywhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import posix

from zerosim.backends.cuda import check as cuda
from zerosim.cli.main import main
from zerosim.comm.transports.mpi import check as mpi
from zerosim.dialects.text import INSTALL as FILES
from zerosim.errors import InputError
from zerosim.grading import EXERCISES, find_exercise
from zerosim.lessons import course as courses
from zerosim.lessons.course import course, exercise_minutes, material, project_url
from zerosim.lessons.handing_out import START, contents, start, write_course
from zerosim.lessons.opening import away, opened

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
URL = "https://github.com/somebody/zerosim"


def test_every_notebook_has_a_row_and_begins_with_its_opening() -> None:
    assert [lesson.file for lesson in course().lessons] == [path.stem for path in NOTEBOOKS]
    for lesson, path in zip(course().lessons, NOTEBOOKS, strict=True):
        text = path.read_text("utf-8")
        assert opened(text, lesson, project_url()) == text, f"python -m zerosim.lessons.opening notebooks: {path.name}"


def test_the_repository_shows_the_page_that_a_student_reads_first() -> None:
    assert (ROOT / "notebooks/README.md").read_text("utf-8") == start()


def test_an_exercise_is_handed_out_once_where_its_row_says() -> None:
    graded = {}
    for path in NOTEBOOKS:
        calls = re.findall(r'"grade\((\w+), \\"(\w+)\\"\)"', path.read_text("utf-8"))
        graded[path.stem] = [name for given, name in calls if given == find_exercise(name).given.__name__]
    assert {lesson.file: list(lesson.exercises) for lesson in course().lessons} == graded
    given = [name for names in graded.values() for name in names]
    assert len(given) == len(set(given))
    assert set(given) <= {one.name for one in EXERCISES}


def test_instructors_have_a_note_on_every_lesson_and_answers_to_its_questions() -> None:
    notes = (ROOT / "notebooks/instructors/README.md").read_text("utf-8")
    answers = (ROOT / "notebooks/instructors/answers.ipynb").read_text("utf-8")
    for lesson in course().lessons:
        assert re.search(rf"^\| (\d\d, )*{lesson.number}\b", notes, re.MULTILINE), lesson.number
    for name in (name for number in ("03", "04", "05", "06") for name in course().lesson(number).exercises):
        assert f"`{name}`" in notes, name
    assert set(re.findall(r"### (\d\d), question", answers)) == {"03", "04", "05", "06", "10", "11"}


def test_needs_are_earlier_and_paths_take_the_time_they_say() -> None:
    numbers = [lesson.number for lesson in course().lessons]
    for lesson in course().lessons:
        assert all(numbers.index(need) < numbers.index(lesson.number) for need in lesson.needs), lesson
    hour, day, weeks = course().ways
    assert hour.minutes <= 60
    assert 60 < day.minutes <= 8 * 60
    assert 8 * 60 < weeks.minutes <= 10 * 4 * 60
    assert exercise_minutes("ddp") == 10


def test_badges_and_links_follow_from_the_one_setting() -> None:
    lesson, text = course().lesson("04"), (ROOT / "notebooks/04_data_parallel.ipynb").read_text("utf-8")
    with_url = opened(text, lesson, URL)
    assert f"colab.research.google.com/github/somebody/zerosim/blob/main/notebooks/{lesson.file}.ipynb" in with_url
    assert f"%pip install git+{URL}" in with_url
    assert opened(with_url, lesson, None) == opened(text, lesson, None)
    assert "colab" not in opened(text, lesson, None)
    first = (ROOT / "notebooks/01_autograd_and_adam.ipynb").read_text("utf-8")
    assert f"]({URL}/blob/main/zerosim/tensor/autograd.py)" in away(first, URL)
    assert "](../" not in away(first, None)


def test_the_setting_is_what_pyproject_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    said = project.get("urls", {}).get("Repository")
    assert project_url() == said, "install again: pip install -e ."


def test_a_project_url_is_read_from_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    from email.message import Message

    found = Message()
    found["Project-URL"] = f"Repository, {URL}/"
    monkeypatch.setattr(courses.importlib.metadata, "metadata", lambda name: found)
    assert project_url() == URL


@pytest.mark.slow
def test_the_course_lands_in_a_new_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my course"
    assert main(["course", str(folder)]) == 0
    assert "Begin with" in capsys.readouterr().out
    there = {
        path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in folder.rglob("*") if path.is_file()
    }
    assert there == contents()
    assert list(contents())[-1] == START  # what --check takes for a whole course
    assert sum(name.endswith(".ipynb") for name in there) == len(NOTEBOOKS)
    assert {f"homework/{one.number:02}_{one.name}.py" for one in EXERCISES} <= set(there)
    assert "scenarios/table1.toml" in there
    for name, text in there.items():
        assert "](../" not in text, name
        if name.endswith(".ipynb"):
            json.loads(text)
    for way in course().ways:
        assert way.name in ("hour", "day", "weeks")


def test_extras_that_errors_advise_are_those_of_pyproject() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for advice, name in ((cuda.INSTALL, "cuda"), (mpi.INSTALL, "mpi"), (FILES, "files")):
        assert shlex.split(advice) == ["pip", "install", *extras[name]]
    for path in (ROOT / "zerosim").rglob("*.py"):
        assert "'zerosim[" not in path.read_text("utf-8"), path


SOME = {
    "01.ipynb": "[]",
    "scenarios/a.toml": "a = 1",
    "scenarios/papers/b.toml": "b = 1",
    "homework/01.py": "",
    START: "#",
}


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A course of a few files."""
    monkeypatch.setattr("zerosim.lessons.handing_out.contents", lambda: SOME)


@pytest.mark.usefixtures("some")
def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("work", "utf-8")
    assert main(["course", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    assert main(["course", str(tmp_path / "mine.py")]) == 2
    assert "is a file" in capsys.readouterr().err


def tree(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.usefixtures("some")
@pytest.mark.parametrize("at", range(len(SOME)))
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_call_that_was_cut_off_is_completed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, share: float
) -> None:
    """In the middle of any file."""
    real, left = Path.write_bytes, at

    def cut_off(path: Path, data: bytes) -> int:
        nonlocal left
        if left == 0:
            real(path, data[: int(share * len(data))])
            raise KeyboardInterrupt
        left -= 1
        return real(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", cut_off)
        with pytest.raises(KeyboardInterrupt):
            write_course(tmp_path)
    assert not (tmp_path / START).exists()
    write_course(tmp_path)
    assert tree(tmp_path) == SOME


@pytest.mark.usefixtures("some")
@pytest.mark.parametrize("name", ["mine.txt", START, f"{START}.part", "homework/mine.py", "homework/01.py", "my/a.py"])
def test_a_course_that_was_cut_off_is_not_completed_beside_work_of_one_s_own(tmp_path: Path, name: str) -> None:
    write_course(tmp_path)
    (tmp_path / START).unlink()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("my own work", "utf-8")
    before = tree(tmp_path)
    with pytest.raises(InputError, match="is not empty"):
        write_course(tmp_path)
    assert tree(tmp_path) == before


@posix
@pytest.mark.usefixtures("some")
@pytest.mark.parametrize("make", [lambda path: path.symlink_to("../elsewhere"), os.mkfifo], ids=["link", "pipe"])
def test_neither_a_link_nor_a_pipe_is_taken_for_a_file_of_a_course(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "course"
    elsewhere.write_text("", "utf-8")
    folder.mkdir()
    make(folder / f"{START}.part")
    with pytest.raises(InputError, match="is not empty"):
        write_course(folder)
    assert elsewhere.read_text("utf-8") == ""


def test_an_incomplete_installation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerosim.lessons.handing_out.material", lambda name: tmp_path)
    with pytest.raises(InputError, match="install zerosim again"):
        write_course(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_material_is_in_the_repository_or_in_the_wheel() -> None:
    assert {path.name for path in NOTEBOOKS} == {path.name for path in material("notebooks").glob("*.ipynb")}


@pytest.mark.slow
def test_a_check_runs_each_notebook_and_names_what_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    (tmp_path / "START.md").write_text("", "utf-8")

    def notebook(source: str) -> str:
        cell = {
            "cell_type": "code",
            "execution_count": None,
            "id": "a",
            "metadata": {},
            "outputs": [],
            "source": source,
        }
        return json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})

    (tmp_path / "1.ipynb").write_text(notebook("open('START.md').close()"), "utf-8")
    (tmp_path / "2.ipynb").write_text(notebook("1 / 0"), "utf-8")
    assert main(["course", str(tmp_path), "--check"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"^1 +\d+\.\d s$", said, re.MULTILINE)
    assert "cell 1 fails" in said
    assert "1 of 2 notebooks ran to their end" in said
