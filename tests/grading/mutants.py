"""Mutants of the published solutions: one constant, operator or call of each is another.

A mutant that is graded full computes the same as the solution, or a check is missing. Those that compute the same are
listed in `equivalent_mutants.toml`, with reasons. `test_mutants.py` grades a sample; all of them, or those of some
exercises at some seeds, take minutes: `python tests/grading/mutants.py [--seeds 0,1] [NAME ...]`.
"""

from __future__ import annotations

import ast
import json
import random
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from forty import SOLUTIONS
from grading_here import grade_source

from zerosim.grading import EXERCISES, Grade, find_exercise
from zerosim.grading.variants import variant

MOST = 40
"""Mutants of a solution."""

_ALIKE: tuple[tuple[type[Any], ...], ...] = (
    (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
    (ast.MatMult, ast.Mult),
    (ast.LShift, ast.RShift),
    (ast.BitAnd, ast.BitOr, ast.BitXor),
    (ast.And, ast.Or),
    (ast.Lt, ast.LtE, ast.Eq, ast.NotEq, ast.GtE, ast.Gt),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
)
"""Operators that may stand in one another's place."""

_CALLS = {
    "max": ("min",), "min": ("max",), "any": ("all",), "all": ("any",), "sorted": ("list",), "ones": ("zeros",),
    "all_reduce": ("reduce_scatter", "all_gather"), "reduce_scatter": ("all_reduce", "all_gather"),
    "all_gather": ("reduce_scatter", "all_reduce"), "launch_all_gather": ("launch_reduce_scatter",),
    "add_grad_whole": ("add_grad_shard",), "add_grad_shard": ("add_grad_whole",),
    "shard": ("whole_param",), "whole_param": ("shard",), "unshard": ("reshard",), "append": ("extend",),
    "InputGrad": ("Backward", "WeightGrad"), "WeightGrad": ("InputGrad",), "Forward": ("Backward",),
    "Backward": ("Forward",), "argsort": ("sort",), "mean": ("sum",), "norm": ("sum",), "abs": ("negative",),
    "sqrt": ("square",), "zeros_like": ("ones_like",), "pop": ("get",), "add": ("discard",),
}  # fmt: skip
_LEFT_OUT = ("annotation", "returns", "decorator_list", "type_comment", "ctx", "op", "ops", "names", "names")


class Mutant(NamedTuple):
    """A solution with one change: the function, the statement as it was and as it is now, and the whole text."""

    exercise: str
    within: str
    was: str
    now: str
    source: str

    def __str__(self) -> str:
        return f"{self.exercise}, {self.within}: {self.was}  ->  {self.now}"


def mutants(exercise: str) -> list[Mutant]:
    """Return all mutants of an exercise's solution, in the order of its text."""
    tree = ast.parse((SOLUTIONS / f"{exercise}.py").read_text("utf-8"))
    found: dict[str, Mutant] = {ast.unparse(tree): Mutant("", "", "", "", "")}
    for place in _places(tree, tree, ""):
        for new in _changes(place.node, _texts(tree)):
            was = _head(place.statement)
            place.put(new)
            source, now = ast.unparse(tree), _head(place.statement)
            place.put(place.node)
            if place.node is place.statement:
                now = ast.unparse(new)
            found.setdefault(source, Mutant(exercise, place.within, was, now, source))
    return list(found.values())[1:]


def sample(exercise: str, most: int = MOST, seed: int = 0) -> list[Mutant]:
    """Return some of them, the same ones for a seed."""
    every = mutants(exercise)
    return random.Random(f"{exercise} {seed}").sample(every, min(most, len(every)))


class _Place(NamedTuple):
    """A node, the statement and the function that it is in, and what puts another node there."""

    node: Any
    statement: ast.AST
    within: str
    put: Callable[[Any], None]


def _places(node: ast.AST, statement: ast.AST, within: str) -> Iterator[_Place]:
    if isinstance(node, ast.FunctionDef):
        within = node.name
    for name, value in ast.iter_fields(node):
        if name in _LEFT_OUT:
            continue
        for at, child in enumerate(value if isinstance(value, list) else [value]):
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if not isinstance(child, ast.AST) or is_text or isinstance(child, ast.Import | ast.ImportFrom):
                continue

            def put(new: ast.AST, name: str = name, value: Any = value, at: int = at) -> None:
                if isinstance(value, list):
                    value[at] = new
                else:
                    setattr(node, name, new)

            inner = child if isinstance(child, ast.stmt) else statement
            yield _Place(child, inner, within, put)
            yield from _places(child, inner, within)


def _changes(node: ast.AST, texts: list[str]) -> Iterator[ast.AST]:
    """Return what may be there in a node's place."""
    match node:
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            others = {value + 1, value - 1, 2 * value, value // 2, 0, -value} - {value}
            yield from (ast.Constant(other) for other in sorted(others))
        case ast.Constant(float(value)):
            yield from (ast.Constant(other) for other in (2 * value, value / 2, 0.0, value + 1, -value))
        case ast.Constant(str(value)):
            yield from (ast.Constant(other) for other in texts if other != value)
        case ast.Constant(None):
            yield ast.Constant(0)
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp():
            yield from (_like(node, op=other()) for other in _others(node.op))
            if isinstance(node, ast.BinOp):
                yield from (node.left, node.right)
            elif isinstance(node, ast.BoolOp):
                yield from node.values
        case ast.Compare(comparators=[ast.Constant(str())], ops=[op]):  # texts have no order
            yield _like(node, ops=[ast.Eq() if isinstance(op, ast.NotEq) else ast.NotEq()])
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                yield from (_like(node, ops=[*ops[:at], other(), *ops[at + 1 :]]) for other in _others(op))
        case ast.UnaryOp(ast.Not() | ast.USub()):
            yield node.operand
        case ast.Expr(ast.Call()):
            yield ast.Pass()
        case ast.Call(func, args, keywords):
            name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
            for other in _CALLS.get(name, ()):
                called = ast.Name(other) if isinstance(func, ast.Name) else _like(func, attr=other)
                yield _like(node, func=called)
            if isinstance(func, ast.Attribute):
                yield func.value
            yield from (_like(node, args=[*args[:at], *args[at + 1 :]]) for at in range(len(args)))
            yield from (_like(node, keywords=[*keywords[:at], *keywords[at + 1 :]]) for at in range(len(keywords)))
            if len(args) == 2 and name not in ("max", "min"):
                yield _like(node, args=args[::-1])
            if args and not isinstance(args[0], ast.Starred | ast.GeneratorExp):
                yield args[0]


def _others(op: ast.AST) -> list[type[Any]]:
    return [other for alike in _ALIKE if type(op) in alike for other in alike if type(op) is not other]


def _like(node: ast.AST, **changes: Any) -> ast.AST:
    return type(node)(**{**dict(ast.iter_fields(node)), **changes})


def _texts(tree: ast.AST) -> list[str]:
    """Return the texts of a solution, without docstrings."""
    nodes = [node for node in ast.walk(tree) if not isinstance(node, ast.Expr)]
    inner = [child for node in nodes for child in ast.iter_child_nodes(node) if isinstance(child, ast.Constant)]
    return sorted({child.value for child in inner if isinstance(child.value, str)} | {"other"})


def _head(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0]


def key(mutant: Mutant) -> tuple[str, ...]:
    """Return a mutant without its text, as the list of equivalent ones names it."""
    return mutant[:4]


def equivalent() -> dict[tuple[str, ...], str]:
    """Return why a mutant computes the same as its solution, for those that do."""
    rows = tomllib.loads((Path(__file__).parent / "equivalent_mutants.toml").read_text("utf-8"))["same"]
    return {tuple(one): row["why"] for row in rows for one in row["mutants"]}


def graded(mutant: Mutant, seed: int = 0) -> Grade:
    """Grade a mutant, as a hand-in to the exercise as that seed has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some compare with a literal by `is`
        return grade_source(mutant.source, variant(find_exercise(mutant.exercise), seed))


def main(words: list[str]) -> int:
    """Grade the mutants of the named exercises, or of all; print those that the list has wrong, and counts."""
    seeds = words[1] if words[:1] == ["--seeds"] else "0"
    names = words[2 * (words[:1] == ["--seeds"]) :] or [one.name for one in EXERCISES]
    listed, total, odd = equivalent(), 0, 0
    for seed, name in product(map(int, seeds.split(",")), names):
        every = mutants(name)
        full = [one for one in every if graded(one, seed).passed]
        wrong = [one for one in every if (one in full) != (key(one) in listed)]
        total, odd = total + len(every), odd + len(wrong)
        print(f"{name}, seed {seed}: {len(every)} mutants, {len(full)} full, {len(wrong)} not as listed", flush=True)
        print(*(json.dumps(key(one), ensure_ascii=False) for one in wrong), sep="\n", end="\n" * bool(wrong))
    print(f"{total} mutants, {odd} not as listed")
    return bool(odd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
