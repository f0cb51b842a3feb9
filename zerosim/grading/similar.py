"""How similar an answer is to zerosim's own files, to published solutions, and to other hand-ins: for instructors only.

Two definitions are compared as their syntax trees, names, constants and annotations erased: the share of runs of five
nodes that both have. Answers of up to 40 nodes are not compared, since right ones are alike. Similarity costs no
points: a reader of both files decides what it means.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from zerosim.errors import InputError
from zerosim.grading.exercise import Exercise
from zerosim.grading.handin_code import parsed

LEAST_NODES = 40
LIKE = 0.85
_RUN = 5
_HOME = Path(__file__).parents[2]
_PUBLISHED = _HOME / "notebooks" / "solutions"
_ERASED = ("annotation", "returns", "decorator_list", "ctx", "type_comment")

Definition = ast.FunctionDef | ast.ClassDef
Shape = tuple[str, ...]


class Part(NamedTuple):
    """A definition, or a function within it: the file, the definition at its top, and how often each run comes."""

    place: str
    top: str
    runs: Counter[Shape]


def own_parts() -> list[Part]:
    """Return the definitions of zerosim's own files, except those that are given with an exercise."""
    folder = _HOME / "zerosim"
    files = [path for path in sorted(folder.rglob("*.py")) if path.parent.name != "given"]
    return [part for path in files for part in _of_file(path, str(path.relative_to(_HOME).as_posix()))]


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


def hand_in_parts(source: str, exercises: Iterable[Exercise], place: str) -> list[Part]:
    """Return the definitions of a hand-in, without the functions that its exercises gave."""
    skeletons = [node for one in exercises for node in _definitions(ast.parse(one.skeleton))]
    given = {_shape(node) for node in skeletons if isinstance(node, ast.FunctionDef)}
    tree = parsed(source)
    for owner in (tree, *_definitions(tree)):
        owner.body = [node for node in owner.body if not (isinstance(node, Definition) and _shape(node) in given)]
    return list(_of_tree(tree, place))


def likenesses(mine: Iterable[Part], sources: Iterable[Iterable[Part]]) -> list[str]:
    """Return what an instructor should look at: for each of a hand-in's definitions the closest part of each source, if
    it is similar enough. 'MyZero2 is 97 % like zerosim/parallel/zero2.py, Zero2'."""
    mine, found = list(mine), list[str]()
    for source in map(list, sources):
        for top in dict.fromkeys(part.top for part in mine):
            pairs = ((_alike(a.runs, b.runs), b) for a in mine if a.top == top for b in source)
            share, other = max(pairs, key=lambda pair: pair[0], default=(0.0, None))
            found += [f"{top} is {share:.0%} like {other.place}, {other.top}"] if other and share >= LIKE else []
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
            shape = _shape(node)
            if len(shape) > LEAST_NODES:
                yield Part(place, top.name, Counter(shape[at : at + _RUN] for at in range(len(shape) - _RUN + 1)))


def _definitions(tree: ast.AST) -> list[Definition]:
    return [node for node in ast.walk(tree) if isinstance(node, Definition)]


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
