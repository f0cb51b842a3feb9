"""The papers' tables, checked in a cell: `zerosim check` of scenarios by name, in any notebook.

The printed figures stand in `scenarios/*.toml`; the verdict is that of `zerosim/analysis/expect`.
"""

from __future__ import annotations

from pathlib import Path

from zerosim.analysis.expect import Runs, judge, read_expectations
from zerosim.config.files import read_scenario_file
from zerosim.errors import InputError
from zerosim.lessons.course import material
from zerosim.report.check import CheckedFile, CheckReport

FOLDERS = (Path("scenarios"), Path("..", "scenarios"), material("scenarios"))
"""Searched in this order: beside the notebook, from the repository's notebooks, the files that came with zerosim."""


def check(*names: str, title: str | None = None, in_full: bool = True) -> CheckReport:
    """Judge scenarios by name, such as 'table1'. `title` asks for one table of one file.

    Raises: InputError for an unknown name or title.
    """
    runs, files = Runs(), []
    for name in names:
        tables = read_expectations(read_scenario_file(str(_find(name))))
        wanted = [table for table in tables if title is None or table.title == title]
        if not wanted:
            raise InputError(f"title {title!r}: scenario {name} has {', '.join(repr(table.title) for table in tables)}")
        files.append(CheckedFile(f"scenarios/{name}.toml", tuple(judge(table, runs) for table in wanted)))
    return CheckReport(files, in_full=in_full)


def _find(name: str) -> Path:
    for folder in FOLDERS:
        if (path := folder / f"{name}.toml").is_file():
            return path
    known = sorted(path.stem for folder in FOLDERS[-1:] for path in folder.glob("*.toml"))
    raise InputError(f"scenario {name!r}: expected one of {', '.join(known)}")
