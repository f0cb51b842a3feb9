"""An exercise as a file: its text, the imports that it needs, and its skeleton."""

from __future__ import annotations

import ast
import textwrap
import tomllib
from importlib import resources

import zerosim.grading as offered
from zerosim.grading.catalogue import EXERCISES
from zerosim.grading.exercise import Exercise
from zerosim.grading.variants import variant

_ELSEWHERE = {"Any": "typing", "Fraction": "fractions", "Callable": "collections.abc"}


def skeleton(one: Exercise, seed: int = 0) -> str:
    """Write the file with which a student begins. Raises: InputError for a seed out of range."""
    one = variant(one, seed)
    cases = [f"  {case.label}" for case in one.cases]
    said = f" --seed {seed}" if seed else ""
    text = [f"Exercise {one.number}, {one.title}. Notebook: {one.notebook}.", "", *textwrap.wrap(one.question, 100), ""]
    text += [*textwrap.wrap(one.more, 100), ""] if one.more else []
    text += ["It is run on:", *cases, ""] if cases else []
    if any(name == "volume" for name, _ in one.judges):
        text += [f"Volume per rank and step: at most {one.volume[0]} elements, times (N-1)/N.", ""]
    text += [*words_of(one), f"Grade it: zerosim grade hw.py{said}"]
    used = {node.id for node in ast.walk(ast.parse(one.skeleton)) if isinstance(node, ast.Name)}
    names = sorted(name for name in used if hasattr(offered, name))
    lines = [f"from {_ELSEWHERE[name]} import {name}" for name in sorted(used & set(_ELSEWHERE))]
    lines += [f"from zerosim.grading import {', '.join(names)}"] if names else []
    body = "\n".join(text)
    return (
        f'"""{body}\n"""\n\nfrom __future__ import annotations\n\n'
        + "\n".join(lines)
        + f"\n\n\n{one.skeleton.strip()}\n"
    )


def words_of(one: Exercise) -> list[str]:
    """Return the words of the API that an answer needs, a line or two each."""
    file = resources.files("zerosim.grading.given").joinpath("words.toml")
    groups = tomllib.loads(file.read_text("utf-8")) if one.words else {}
    rows = [f"  {name}: {meaning}" for group in one.words for name, meaning in groups[group].items()]
    lines = [line for row in rows for line in textwrap.wrap(row, 100, subsequent_indent="      ")]
    return ["Words that you can use:", *lines, ""] if lines else []


def listed() -> str:
    """Return the exercises' numbers, names and titles, a line each, with the notebook that asks for each."""
    wide = max(len(one.name) for one in EXERCISES)
    rows = [f"{one.number:>2}  {one.name:<{wide}}  {one.title} (notebook {one.notebook[:2]})" for one in EXERCISES]
    return "\n".join(rows) + "\n"
