"""What of a hand-in runs: the answer, and what it needs."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerosim.errors import InputError
from zerosim.grading.handin_code import made, needed


@pytest.fixture(autouse=True)
def _no_module_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    sys.modules.pop("handin", None)


def test_a_dataclass_an_enum_and_a_named_tuple_may_help() -> None:
    source = """
from __future__ import annotations
import enum
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

@dataclass(frozen=True, slots=True)
class Cut:
    start: int
    names: list[str] = field(default_factory=list)
    of: ClassVar[int] = 3

class Way(enum.Enum):
    UP = 1

class Pair(NamedTuple):
    a: Way
    b: Cut

def mine(start):
    return Pair(Way.UP, Cut(start))
"""
    pair = made("hw.py", source, "mine")(5)
    assert (pair.a.value, pair.b.start, pair.b.names, type(pair.b).of) == (1, 5, [], 3)


def test_what_the_answer_does_not_need_is_not_run() -> None:
    source = """
import no_such_module
from os import path, sep as slash
lost = 1 / 0
result = zs.grade(mine, "bounds")
(few, more), table = (2, 3), {}
def size(numel): return numel // few + more + table["own"]
table["own"] = 4
def mine(numel): return None
def better(numel): return size(numel), slash
mine = better
"""
    assert made("hw.py", source, "mine")(10)[0] == 5 + 3 + 4


def test_what_the_answer_needs_and_cannot_have_is_named_with_its_line() -> None:
    with pytest.raises(InputError, match=r"hw.py, line 2: raised ModuleNotFoundError: No module named 'no_such"):
        made("hw.py", "\nimport no_such_module\ndef mine(): return no_such_module", "mine")
    with pytest.raises(InputError, match=r"hw.py: mine is not defined"):
        made("hw.py", "mine: int", "mine")


def test_a_local_variable_brings_no_cell_along() -> None:
    """What other cells call `grad` and `first` does not run, and is none of the answer's work."""
    source = """
import numpy as np
SCALE = 2.0
first = 1 / 0
grad: float = undefined
def slice_of(numel, rank, world_size):
    grad = [first for first in range(numel)]
    def inner(part: np.ndarray) -> float:
        return SCALE * len(grad)
    return inner(rank)
async def waits():
    pass
"""
    found = needed(ast.parse(source), "slice_of")
    heads = [ast.unparse(node).split("\n")[0] for node in found]
    assert heads == ["import numpy as np", "SCALE = 2.0", "def slice_of(numel, rank, world_size):"]


def test_a_file_with_a_future_import_may_stand_in_a_later_cell() -> None:
    source = """
scale = 2
from __future__ import annotations
def mine(numel: Undefined): return scale * numel
"""
    assert made("hw.ipynb", source, "mine")(3) == 6
