"""build.py OUT: the site from docs/, notebooks and docstrings, as HTML in a folder. A warning is an error.

Links to pages of the site lead there; links to other files lead to the project where it has a URL, and are plain words
where it has none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sphinx.cmd.build import main as sphinx

from zerosim.cli.lecture import lecture_pages
from zerosim.cli.page import calculator_page
from zerosim.config import RunConfig
from zerosim.lessons.course import course, project_url
from zerosim.lessons.opening import dumped, opened, with_prose
from zerosim.playback import encode, record
from zerosim.playback.html import page as page_of

ROOT = Path(__file__).resolve().parents[2]
FIRST = ("advise", "ten_jobs", "for_programs", "homework")
REFERENCE = ("counting", "time", "meshes", "architecture", "glossary")
API = {
    "zerosim": "what a program begins with",
    "parallel": "the stages, and what they are made of",
    "placement": "who holds what",
    "comm": "collectives and worlds",
    "nn": "layers and units",
    "tensor": "tensors, flat buffers, autograd",
    "optim": "optimizers and precision",
    "device": "the doors at which bytes are counted",
    "ledger": "readers of the record",
    "state": "checkpoints: saved on each rank, gone on from on any mesh, of other frameworks",
    "grading": "what exercises are written with, and how they are judged",
    "lessons": "the pictures and tables of the notebooks",
}
MEMBERS = ("run", "plan", "launch", "debug", "grade", "gradcheck", "RunConfig", "RunResult", "World", "Context")
PLAYERS = {
    "03_collectives": (
        "A step of data parallelism: each all-reduce goes round a ring.",
        dict(stage=0, collective="ring"),
    ),
    "04_data_parallel": ("A step of data parallelism: gradients are averaged, unit after unit.", dict(stage=0)),
    "05_zero1_and_zero2": ("A step of ZeRO-2: each gradient goes to the rank that updates with it.", dict(stage=2)),
    "06_zero3": ("A step of ZeRO-3: gathered, used, freed.", dict(stage=3, collective="ring")),
    "13_pipelines": (
        "A step of a pipeline of four stages, four microbatches.",
        dict(pp=4, layers=4, accumulate=4),
    ),
    "25_where_is_my_model": ("A step of ZeRO-3: which rank holds which part when.", dict(stage=3, layers=2)),
}
"""By lesson that steps through a run, what its page plays beside the text, and the run."""
_PLAYED: dict[str, Any] = dict(ranks=4, steps=1, layers=1, hidden=32, heads=2, seq=16)
_FRAME = """\
{about} Press play, or step with the arrow keys; <a href="../players/{name}.html">the player on a page of its own</a>.

<iframe src="../players/{name}.html" title="{about}" width="100%" height="1240" style="border:0"></iframe>
"""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def pages() -> dict[str, str]:
    """Where each file of the repository stands on the site."""
    found = {
        "docs/site/index.md": "index.md",
        "zerosim/primer.md": "start.md",
        "notebooks/README.md": "course/index.md",
    }
    found |= {f"docs/{name}.md": f"howto/{name}.md" for name in how_to()}
    found |= {f"docs/{name}.md": f"reference/{name}.md" for name in REFERENCE}
    found |= {f"notebooks/{one.file}.ipynb": f"course/{one.file}.ipynb" for one in course().lessons}
    return found


def how_to() -> tuple[str, ...]:
    """The pages of docs/ that are no reference, those that a newcomer wants first."""
    names = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))
    return (*FIRST, *(name for name in names if name not in (*FIRST, *REFERENCE)))


def relinked(source: str, page: str, at: dict[str, str], url: str | None) -> Callable[[str], str]:
    """How a page's links change when it moves from `source` to `page`."""

    def link(match: re.Match[str]) -> str:
        picture, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        there = os.path.normpath(os.path.join(os.path.dirname(source), target)).replace(os.sep, "/")
        if there in at:
            return f"[{words}]({os.path.relpath(at[there], os.path.dirname(page) or '.').replace(os.sep, '/')}{anchor})"
        if picture:
            up = os.path.relpath(f"files/{Path(there).name}", os.path.dirname(page) or ".").replace(os.sep, "/")
            return f"![{words}]({up})"
        return f"[{words}]({url}/blob/main/{there}{anchor})" if url else words

    return lambda text: _LINK.sub(link, text)


def lay_out(folder: Path) -> None:
    """Write every page into a folder for Sphinx."""
    url, at = project_url(), pages()
    (folder / "files").mkdir()
    for source, page in at.items():
        out = folder / page
        out.parent.mkdir(parents=True, exist_ok=True)
        text, change = (ROOT / source).read_text("utf-8"), relinked(source, page, at, url)
        if source.endswith(".ipynb"):
            lesson = course().lesson(Path(source).stem)
            text_of = with_alts(with_prose(opened(text, lesson, url), change))
            out.write_text(with_player(text_of, lesson.file), "utf-8")
        else:
            out.write_text(change(text) + _tree(page), "utf-8")
        for match in _LINK.finditer(text):
            if match[1]:
                shutil.copy((ROOT / source).parent / match[3], folder / "files")
    shutil.copy(ROOT / "docs/site/conf.py", folder)
    _write_players(folder / "extra" / "players")
    for name, title, entries in (("howto", "How to", how_to()), ("reference", "Reference", REFERENCE)):
        (folder / name / "index.md").write_text(f"# {title}\n" + _toctree(entries), "utf-8")
    _write_api(folder / "api")


def with_alts(text: str) -> str:
    """Give each picture of a notebook its alternative text, where MyST-NB looks for it."""
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            if words := output.get("metadata", {}).get("image/png", {}).get("alt"):
                cell["metadata"].setdefault("mystnb", {})["image"] = {"alt": words}
    return dumped(notebook)


def with_player(text: str, name: str) -> str:
    """Put a frame with the lesson's player below a notebook's opening, where the lesson has one."""
    if name not in PLAYERS:
        return text
    notebook = json.loads(text)
    frame = _FRAME.format(about=PLAYERS[name][0], name=name)
    cell = {"cell_type": "markdown", "id": "player", "metadata": {}, "source": frame.splitlines(keepends=True)}
    notebook["cells"].insert(1, cell)
    return dumped(notebook)


def _write_players(folder: Path) -> None:
    """Record each player's run, and write its page."""
    folder.mkdir(parents=True)
    for name, (_, changes) in PLAYERS.items():
        config = RunConfig(**{**_PLAYED, **changes})
        (folder / f"{name}.html").write_text(page_of(encode(record(config))), "utf-8")


def _tree(page: str) -> str:
    if page == "index.md":
        return _toctree(("start", "course/index", "howto/index", "reference/index", "api/index"), hidden=True)
    return _toctree([one.file for one in course().lessons], hidden=True) if page == "course/index.md" else ""


def _toctree(entries: tuple[str, ...] | list[str], *, hidden: bool = False) -> str:
    lines = ["", "```{toctree}", ":maxdepth: 1", *([":hidden:"] if hidden else []), "", *entries, "```", ""]
    return "\n".join(lines)


def _write_api(folder: Path) -> None:
    """Write a page for each room: its modules with their docstrings."""
    folder.mkdir()
    for room, about in API.items():
        lines = [f"# {room}", "", f"{about.capitalize()}.", ""]
        if room == "zerosim":
            lines += _rst(".. automodule:: zerosim")
            for member in MEMBERS:
                kind = "class" if member[0].isupper() else "function"
                lines += _rst(f".. auto{kind}:: zerosim.{member}")
        else:
            for path in sorted((ROOT / "zerosim" / room).glob("*.py")):
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                if path.read_text("utf-8").strip():
                    lines += [f"## {name}", "", *_rst(f".. automodule:: {name}", "   :members:")]
        (folder / f"{room}.md").write_text("\n".join(lines), "utf-8")
    (folder / "index.md").write_text("# API\n" + _toctree(list(API)), "utf-8")


def _rst(*lines: str) -> list[str]:
    return ["```{eval-rst}", *lines, "```", ""]


def main(out: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(folder))
        for name, text in {**lecture_pages(), "calculator.html": calculator_page()}.items():
            (Path(folder) / "extra" / name).write_text(text, "utf-8")
        return sphinx(
            ["-W", "--keep-going", "-q", "-j", "auto", "-b", "html", "-d", f"{folder}/.doctrees", folder, out]
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
