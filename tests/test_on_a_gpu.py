"""The script that checks a GPU: which tests failed is said at once, and kept though the part is stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from on_a_gpu import Part, keep, main, parts, unfit

LINES = [
    ("tests/backends/test_cuda.py::test_a[2-fp16] PASSED                    [ 10%]", None),
    ("tests/backends/test_cuda.py::test_a[3 bf16 zero] FAILED               [ 20%]", "test_a[3 bf16 zero]"),
    ("[gw4] [ 30%] FAILED tests/backends/test_cuda.py::test_b[sgd 0.9] ", "test_b[sgd 0.9]"),
    ("[gw1] [ 31%] ERROR tests/backends/test_cuda.py::test_c ", "test_c"),
    ("FAILED tests/backends/test_cuda.py::test_b[sgd 0.9] - AssertionError: FAILED", "test_b[sgd 0.9]"),
    ("ERROR tests/backends/test_cuda.py - ImportError: no cupy", ""),
    ("E   an ERROR of a GPU, which FAILED", None),
]


@pytest.mark.parametrize(("line", "name"), LINES)
def test_a_line_that_names_a_test_which_failed(line: str, name: str | None) -> None:
    file = "tests/backends/test_cuda.py"
    assert unfit(line) == (None if name is None else f"{file}::{name}" if name else file)


def test_a_part_that_is_stopped_leaves_what_it_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "\n".join(line for line, _ in LINES)
    program = f"import time; print({said!r}); time.sleep(600)"
    code, _, failed = keep(Part("stuck", (sys.executable, "-c", program), 600), tmp_path, 3)
    assert code is None
    assert (tmp_path / "stuck.txt").read_text("utf-8").splitlines() == said.splitlines()
    assert capsys.readouterr().out.splitlines() == [f"failed: {name}" for name in failed]
    assert [name.partition("::")[2] for name in failed] == ["test_a[3 bf16 zero]", "test_b[sgd 0.9]", "test_c", ""]


def test_no_part_begins_without_time(tmp_path: Path) -> None:
    assert main([str(tmp_path), "--minutes", "0"]) == 1
    names = [part.name for part in parts(tmp_path, suite=False, seconds=0)]
    kept = (tmp_path / "summary.txt").read_text("utf-8").splitlines()
    assert kept == [f"{name}: not started, no time was left" for name in names]
