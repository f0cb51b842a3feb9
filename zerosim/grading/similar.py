"""How similar an answer is to zerosim's own files, to published solutions, and to other hand-ins: for instructors only.

Definitions are compared as their syntax trees, names, constants and annotations erased, and names that are used once
replaced by their values: the share of runs of five nodes that both have. First the runs of the skeleton and of the
published solution are taken away: honest answers share these. What is left of a short or usual answer is not compared.
Similarity costs no points: a reader of both files decides what it means.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import NamedTuple

from zerosim.errors import InputError
from zerosim.grading.exercise import Exercise
from zerosim.grading.handin_code import parsed

LEAST_RUNS = 25
LIKE = 0.85
_RUN = 5
_HOME = Path(__file__).parents[2]
_PUBLISHED = _HOME / "notebooks" / "solutions"
_ERASED = ("annotation", "returns", "decorator_list", "ctx", "type_comment")

Definition = ast.FunctionDef | ast.ClassDef
Shape = tuple[str, ...]


class Part(NamedTuple):
    """A definition, or a function within it: the file, the definition at its top, how often each run comes, and the
    runs that were taken away."""

    place: str
    top: str
    runs: Counter[Shape]
    usual: frozenset[Shape] = frozenset()


@cache
def own_parts() -> tuple[Part, ...]:
    """Return the definitions of zerosim's own files, except those that are given with an exercise."""
    folder = _HOME / "zerosim"
    files = [path for path in sorted(folder.rglob("*.py")) if path.parent.name != "given"]
    return tuple(part for path in files for part in _of_file(path, str(path.relative_to(_HOME).as_posix())))


def published_parts(folder: str | None) -> list[Part]:
    """Return those of the published solutions: of a folder or, in a checkout, of notebooks/solutions.

    Raises: InputError for a folder without a script that can be read.
    """
    files = [path for path in sorted((Path(folder) if folder else _PUBLISHED).glob("*.py")) if path.is_file()]
    try:
        found = [part for path in files for part in _of_file(path, f"solutions/{path.name}")]
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(f"--published {folder}: cannot be read: {error}") from None
    if folder and not files:
        raise InputError(f"--published {folder}: contains no script; expected a folder of solutions ending in .py")
    return found


def hand_in_parts(
    source: str, exercises: Iterable[Exercise], place: str, published: Iterable[Part] | None = None
) -> list[Part]:
    """Return the definitions of a hand-in, without the runs of what its exercises give and of the published solutions
    (default: those of this checkout)."""
    exercises = list(exercises)
    names = {one.given.__name__ for one in exercises}
    known = published_parts(None) if published is None else published
    usual = {run for part in known if part.top in names for run in part.runs}
    for one in exercises:
        usual |= {run for part in _of_tree(ast.parse(one.skeleton), "") for run in part.runs}
    whole = _of_tree(parsed(source), place)
    return [part for each in whole if (part := _without(each, frozenset(usual))).runs.total() >= LEAST_RUNS]


def _without(part: Part, usual: frozenset[Shape]) -> Part:
    return part._replace(runs=Counter({run: n for run, n in part.runs.items() if run not in usual}), usual=usual)


def likenesses(mine: Iterable[Part], sources: Iterable[Iterable[Part]]) -> list[str]:
    """Return what an instructor should look at: for each of a hand-in's definitions the closest part of each source, if
    it is similar enough. 'MyZero2 is 97% like zerosim/parallel/zero2.py, Zero2'. Of several hand-ins with one form
    their number is said."""
    mine, found = list(mine), list[str]()
    for source in map(list, sources):
        for top in dict.fromkeys(part.top for part in mine):
            shares: dict[tuple[str, str], float] = {}
            for a, b in ((a, b) for a in mine if a.top == top for b in source):
                share = _alike(a.runs, _without(b, a.usual).runs)
                shares[b.place, b.top] = max(share, shares.get((b.place, b.top), 0.0))
            alike = {key: share for key, share in shares.items() if share >= LIKE}
            if alike:
                place, other = max(alike, key=lambda key: alike[key])
                files, of = (len({place for place, _ in keys}) for keys in (alike, shares))
                several = f" ({files} of {of} files have this form)" if len(alike) > 1 else ""
                found.append(f"{top} is {alike[place, other]:.0%} like {place}, {other}{several}")
    return found


def _alike(a: Counter[Shape], b: Counter[Shape]) -> float:
    size, other = a.total(), b.total()
    if 2 * min(size, other) < LIKE * (size + other):  # the smaller one holds too little
        return 0.0
    return 2 * (a & b).total() / (size + other)


def _of_file(path: Path, place: str) -> Iterator[Part]:
    yield from _of_tree(ast.parse(path.read_text("utf-8")), place)


def _of_tree(tree: ast.Module, place: str) -> Iterator[Part]:
    for top in (node for node in tree.body if isinstance(node, Definition)):
        for node in _definitions(top):
            shape = _shape(_inlined(node))
            if len(shape) >= _RUN:
                yield Part(place, top.name, Counter(shape[at : at + _RUN] for at in range(len(shape) - _RUN + 1)))


def _definitions(tree: ast.AST) -> list[Definition]:
    return [node for node in ast.walk(tree) if isinstance(node, Definition)]


class _Values(ast.NodeTransformer):
    """Replaces names by values."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_read = isinstance(node.ctx, ast.Load) and node.id in self.values
        return self.visit(self.values[node.id]) if is_read else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        target = node.targets[0]
        if len(node.targets) == 1 and isinstance(target, ast.Name) and target.id in self.values:
            return None
        return self.generic_visit(node)


def _inlined(node: Definition) -> ast.AST:
    """Return a definition without its temporaries: names that are bound once, and read once."""
    names = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
    reads = Counter(one.id for one in names if isinstance(one.ctx, ast.Load))
    binds = Counter(one.id for one in names if not isinstance(one.ctx, ast.Load))
    simple = [one for one in ast.walk(node) if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)]
    values = {one.targets[0].id: one.value for one in simple if isinstance(one.targets[0], ast.Name)}
    once = {name: value for name, value in values.items() if (reads[name], binds[name]) == (1, 1)}
    return _Values(once).visit(deepcopy(node)) if isinstance(node, ast.FunctionDef) and once else node


def _shape(node: ast.AST) -> Shape:
    """Return the kinds of a tree's nodes, in the order of the text; docstrings and types are left out."""
    return tuple(_kinds(node))


def _kinds(node: ast.AST) -> Iterator[str]:
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        for inner in value if isinstance(value, list) else [value]:
            is_text = isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant)
            if isinstance(inner, ast.AST) and name not in _ERASED and not is_text:
                yield from _kinds(inner)
