"""A hand-in's code, run in the answer's process only: the statements that the answer needs, and nothing else.

An answer needs its own definition, and the imports, definitions and assignments whose names these use, in the order of
the file. So an experiment in another cell takes no time, and its error costs no point.
"""

from __future__ import annotations

import ast
import dis
import sys
import warnings
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

from zerosim.errors import InputError
from zerosim.grading.own_code import error_words

_NAME = "handin"
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_READS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_CLASSDEREF")
_KEPT = (ast.Import, ast.ImportFrom, *_DEFINITIONS, ast.Assign, ast.AnnAssign)


def made(name: str, source: str, wanted: str) -> Any:
    """Run the statements that an answer needs, and return the object of that name. Runs in the process of the answer.

    Raises: InputError in the words of the exception that its code raises.
    """
    tree = ast.parse(source)
    tree.body = sorted(needed(tree, wanted), key=lambda node: not _is_future(node))  # a later cell may have one
    module = ModuleType(_NAME)
    module.__file__ = name
    sys.modules[_NAME] = module  # dataclasses look their module up by its name
    try:
        exec(compile(tree, name, "exec"), vars(module))
    except BaseException as error:  # SystemExit too
        trace, line = error.__traceback__, 0
        while trace is not None:
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == name else line
            trace = trace.tb_next
        raise InputError(f"{name}, line {line}: raised {error_words(error)}") from None
    if not hasattr(module, wanted):
        raise InputError(f"{name}: {wanted} is not defined; write its class or function")
    return getattr(module, wanted)


def parsed(source: str) -> ast.Module:
    """Return a file's tree. Python's warnings about it are not shown: they quote the file, control characters too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def needed(tree: ast.Module, wanted: str) -> list[ast.stmt]:
    """Return the statements that define `wanted` and the names it uses, and the names these use."""
    rows = [(node, set(_bound(node)), _used(node)) for node in tree.body if isinstance(node, _KEPT)]
    names, kept = {wanted}, set[int]()
    while True:
        found = {at for at, (_, bound, _) in enumerate(rows) if bound & names or "*" in bound} - kept
        if not found:
            return [rows[at][0] for at in sorted(kept)]
        kept |= found
        names = names.union(*(rows[at][2] for at in found))


def defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement gives a class, a function or another value."""
    return list(_bound(node)) if isinstance(node, (*_DEFINITIONS, ast.Assign, ast.AnnAssign)) else []


def _bound(node: ast.stmt) -> Iterator[str]:
    """Return the names that a statement binds or, as `MyZero2.step = step`, changes; '*' if it may be all."""
    if isinstance(node, _DEFINITIONS):
        yield node.name
    elif isinstance(node, ast.ImportFrom):
        yield from ("*" if _is_future(node) else alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from _named(target)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _used(node: ast.stmt) -> set[str]:
    """Return the names of the file that a statement reads: not a function's local variables, even if other cells use
    their names."""
    try:
        code = compile(ast.Module([node], []), "statement", "exec", dont_inherit=True)
    except SyntaxError:  # such as an await, which a notebook may have outside of functions
        return _named(node)
    return set(_read(code))


def _read(code: CodeType) -> Iterator[str]:
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in _READS)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _read(inner)


def _named(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
