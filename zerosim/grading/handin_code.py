"""A hand-in's code, run: in the process of the answer alone. Its imports, definitions and assignments run, no more."""

from __future__ import annotations

import ast
from typing import Any

from zerosim.errors import InputError
from zerosim.grading.own_code import error_words

_KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


def made(name: str, source: str, wanted: str) -> Any:
    """Run what a hand-in defines, and give the object of that name. Runs in the process of the answer.

    Raises: InputError in the words of whatever its code raises.
    """
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if _is_kept(node)]
    space: dict[str, Any] = {"__name__": "handin"}
    try:
        exec(compile(tree, name, "exec"), space)
    except BaseException as error:  # SystemExit too
        trace, line = error.__traceback__, 0
        while trace is not None:
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == name else line
            trace = trace.tb_next
        raise InputError(f"{name}, line {line}: raised {error_words(error)}") from None
    return space[wanted]


def _is_kept(node: ast.stmt) -> bool:
    """A docstring is no statement that does anything; `g = grade(MyZero2, ...)` is none of an answer's."""
    called = {call.func.id for call in ast.walk(node) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}
    is_grading = isinstance(node, ast.Assign | ast.AnnAssign) and bool(called & {"grade", "step_into"})
    return isinstance(node, _KEPT) and not is_grading
