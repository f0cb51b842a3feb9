"""The algorithm is visible: ZeRO's own files are few and short, and need nothing of what shows it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import finished

from zerosim.config import RunConfig
from zerosim.lessons import plain_zero3
from zerosim.train.run import run

ROOT = Path(__file__).parent.parent
WITHOUT = "report cli grading lessons bench stepper playback analysis backends.cuda comm.transports.mpi"
PROGRAM = f"""
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        rooms = [f"zerosim.{{room}}" for room in {WITHOUT.split()!r}] + ["cupy", "mpi4py", "rich", "matplotlib"]
        if any(name == room or name.startswith(room + ".") for room in rooms):
            raise ImportError(f"{{name}} is shut")

sys.meta_path.insert(0, Refuses())
from zerosim.config import RunConfig
from zerosim.train.run import run
losses = [run(RunConfig(stage=stage, ranks=2, steps=2)).losses for stage in range(4)]
assert losses[1:] == losses[:-1]
print(losses[0][-1] < losses[0][0])
"""


def lines_of(*paths: str) -> int:
    return sum(len((ROOT / "zerosim" / path).read_text("utf-8").splitlines()) for path in paths)


def test_the_stages_train_without_what_shows_them() -> None:
    done = finished([sys.executable, "-c", PROGRAM])
    assert done.stdout == "True\n", done.stderr


@pytest.mark.bits
@pytest.mark.parametrize("changes", [{}, {"ranks": 3, "model": "llama", "tie_embeddings": False}], ids=str)
def test_stage_3_in_twenty_lines_has_the_bits_of_the_real_one(changes: dict[str, object]) -> None:
    config = RunConfig(**{"stage": 3, "ranks": 4, "steps": 3, "precision": "fp32", **changes})
    mine, theirs = plain_zero3.train(config), run(config).weights
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)


def test_zeros_own_files_are_short() -> None:
    assert lines_of("parallel/zero3.py") < 70
    assert lines_of("parallel/base.py") <= 130
    parts = (f"parallel/{name}.py" for name in ("zero3", "stage", "base", "gathered", "reducer", "exchange"))
    assert lines_of(*parts, "tensor/flat.py", "nn/unit.py") <= 1300
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    first = page[page.index("## ZeRO itself") : page.index("## Ideas")]
    named = dict.fromkeys(re.findall(r"\]\(\.\./zerosim/(\S+?\.py)\)", first))
    assert len(named) > 30
    assert lines_of(*named) <= 4500
