"""An exercise as a file: its text, the imports that it needs, and its skeleton."""

from __future__ import annotations

import ast
import textwrap

import zerosim.grading as offered
from zerosim.grading.exercise import Exercise
from zerosim.grading.variants import variant

_ELSEWHERE = {"Any": "typing", "Fraction": "fractions", "Callable": "collections.abc"}


def skeleton(one: Exercise, seed: int = 0) -> str:
    """Write the file with which a student begins. Raises: InputError for a seed out of range."""
    one = variant(one, seed)
    cases = [f"  {case.label}" for case in one.cases]
    said = f" --seed {seed}" if seed else ""
    text = [f"Exercise {one.number}, {one.title}.", "", *textwrap.wrap(one.question, 100), ""]
    text += [*(["It is run on:", *cases, ""] if cases else []), f"Grade it: zerosim grade hw.py{said}"]
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
