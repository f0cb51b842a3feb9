"""A strategy's own lines beside PyTorch's and DeepSpeed's, and the event that each call makes.

A lesson shows them once the exercise is solved. `beside.toml` holds PyTorch's and DeepSpeed's lines. zerosim's lines
are read from its files, and the events are counted in a run.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from typing import Any

import zerosim
from zerosim.errors import InputError
from zerosim.grading.catalogue import find_exercise
from zerosim.grading.exercise import Exercise
from zerosim.grading.report import Grade

_PANE = "flex:1 1 20em;min-width:0;margin:0 .5em .5em 0"
_CODE = "white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px;line-height:1.35;margin:0"


@dataclass(frozen=True, slots=True)
class Call:
    """A framework's call, and the event that it makes: '' for none. Calls and bytes are rank 0's in one step."""

    text: str
    event: str
    calls: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Beside:
    """Panes of code by title, and the calls. Without panes the exercise is not solved yet."""

    title: str
    panes: Mapping[str, str]
    calls: tuple[Call, ...]
    note: str

    def __str__(self) -> str:
        if not self.panes:
            return self.note
        rows = [f"{call.text}: {_happens(call)}" for call in self.calls]
        return "\n\n".join([*(f"{title}\n{code}" for title, code in self.panes.items()), "\n".join(rows), self.note])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        panes = "".join(
            f'<div style="{_PANE}"><b>{escape(title)}</b><pre style="{_CODE}">{escape(code)}</pre></div>'
            for title, code in self.panes.items()
        )
        rows = "".join(
            f'<tr><td style="text-align:left">{escape(call.text)}</td>'
            f'<td style="text-align:left">{escape(_happens(call))}</td></tr>'
            for call in self.calls
        )
        table = f"<table>{rows}</table>" if rows else ""
        return f'<div style="display:flex;flex-wrap:wrap">{panes}</div>{table}<p>{escape(self.note)}</p>'


def _happens(call: Call) -> str:
    if not call.event:
        return "no event: nothing is sent"
    return f"{call.event}, {call.calls} in a step, {call.sent_bytes:,} B sent by rank 0"


def beside(shown: Mapping[int, object], name: str) -> Beside:
    """Open an exercise's strategy, if one of the outputs in `shown` (a notebook's `Out`) is its full grade.

    Raises: InputError for an exercise without such lines.
    """
    if name not in _rows():
        raise InputError(f"no comparison for exercise {name}: expected one of {', '.join(_rows())}")
    one = find_exercise(name)
    if is_solved(shown, name):
        return opened(name)
    return Beside(one.title, {}, (), _first(one) + "zerosim's own lines, and beside them PyTorch's and DeepSpeed's.")


def is_solved(shown: Mapping[int, object], name: str) -> bool:
    """Return whether an output in `shown` is the exercise's full grade."""
    grades = [grade for grade in shown.values() if isinstance(grade, Grade) and grade.exercise.name == name]
    return any(grade.passed for grade in grades)


def once_solved(shown: Mapping[int, object], name: str, source: str) -> str:
    """Return source text that would give an exercise away, once that is solved; until then words that say so."""
    return source if is_solved(shown, name) else _first(find_exercise(name)) + "zerosim's own lines."


def _first(one: Exercise) -> str:
    return f"Solve exercise {one.number} first. Then run this cell again: it shows "


def opened(name: str) -> Beside:
    """Show the lines beside an exercise, and count the events in a run of one step on four ranks."""
    row = _rows()[name]
    run = zerosim.run(zerosim.RunConfig(stage=row["stage"], ranks=4, steps=1))

    def call(text: str, event: str) -> Call:
        phase, op = event.split() if event else ("", "")
        found = [one for one in run.traffic[0] if (one.phase, one.op) == (phase, op) and one.purpose == "states"]
        return Call(text, event, sum(one.calls for one in found), sum(one.wire_bytes for one in found))

    panes = {f"zerosim, {row['module'].replace('.', '/')}.py": _lines(row["module"], row["name"])}
    for key, title in (("pytorch", "PyTorch"), ("deepspeed", "DeepSpeed's JSON")):
        if row[key]:
            panes[title] = row[key].strip()
    return Beside(find_exercise(name).title, panes, tuple(call(*pair) for pair in row["calls"]), row["note"])


def _lines(module: str, name: str) -> str:
    """Return the source of a class or function, without its docstring."""
    source = inspect.getsource(getattr(importlib.import_module(module), name))
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef | ast.FunctionDef)
    lines = source.splitlines()
    first = body.body[0]
    if ast.get_docstring(body) is not None and first.end_lineno is not None:
        del lines[first.lineno - 1 : first.end_lineno]
        while len(lines) > 1 and not lines[1].strip():
            del lines[1]
    return "\n".join(lines).strip()


@cache
def _rows() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resources.files("zerosim.lessons").joinpath("beside.toml").read_text("utf-8"))
