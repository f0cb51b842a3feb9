"""The course notebooks: each is executed from a clean kernel, and must give the outputs that are committed.

What counts as the same is said in `notebook_outputs.py`. The instructors' answers are among them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from notebook_outputs import differences, outputs, read, texts

from zerosim.grading import EXERCISES

SHAPES_ALONE = ("07", "08", "09", "15", "20", "24")
"""Notebooks that plan and train nothing: no BLAS can change what they show."""

ROOT = Path(__file__).parent.parent
NOTEBOOKS = [
    path for folder in ("notebooks", "notebooks/instructors") for path in sorted((ROOT / folder).glob("*.ipynb"))
]
SECONDS = 300.0  # a minute alone; a shared, slow machine takes longer, and no test measures time
MISSING = [name for name in ("nbclient", "nbformat", "ipykernel") if importlib.util.find_spec(name) is None]
PATHS = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|usr|var|opt|mnt|private|Users)/\w|\b[A-Z]:\\\w| at 0x[0-9a-f]{6}")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
needs_jupyter = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install -e '.[test]'"
)


# -- executing ---------------------------------------------------------------------------------------
def executed(path: Path, folder: Path, seconds: float = SECONDS) -> list[dict[str, Any]]:
    """The code cells with the outputs of a run from a clean kernel. Raises: AssertionError in the runner's words."""
    jupyter = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    moved = {"IPYTHONDIR": str(folder / "ipython"), "JUPYTER_PREFER_ENV_PATH": "1", **jupyter}
    moved["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    dropped = (
        "COLUMNS",
        "LINES",
        "JUPYTER_COLUMNS",
        "JUPYTER_LINES",
        "FORCE_COLOR",
        "NO_COLOR",
        "PYTHONWARNINGS",
        "MPLBACKEND",
    )
    environment = {name: value for name, value in os.environ.items() if name not in dropped} | moved
    out = folder / path.name
    command = [
        sys.executable,
        str(Path(__file__).with_name("execute_notebook.py")),
        str(path),
        str(out),
        f"{seconds:g}",
    ]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, timeout=seconds + 120)
    assert done.returncode == 0, f"{path.name}: {done.stderr.strip()[-3000:]}"
    return read(out)


@pytest.mark.slow
@needs_jupyter
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.name.startswith(SHAPES_ALONE) else pytest.mark.bits) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_clean_run_gives_the_committed_outputs(path: Path, tmp_path: Path) -> None:
    changed = differences(read(path), executed(path, tmp_path))
    assert not changed, "\n".join([*changed, "where that is meant, run the notebook and commit its outputs"])


@each_notebook
def test_committed_outputs_are_those_of_one_clean_run(path: Path) -> None:
    cells = read(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell["outputs"] for cell in cells), "no outputs: commit the executed notebook"
    for output in (output for cell in cells for output in outputs(cell)):
        assert not {"error", "stream/stderr"} & set(output), output


@each_notebook
def test_outputs_name_no_path_and_no_host(path: Path) -> None:
    host = socket.gethostname()
    is_telling = len(host) > 3 and re.search(r"[\d.-]", host) is not None  # not an ordinary word
    for text in (text for cell in read(path) for text in texts(cell)):
        found = PATHS.search(text)
        assert found is None, text[max(0, found.start() - 40) : found.end() + 40]
        assert str(ROOT) not in text
        assert sys.prefix not in text
        assert not (is_telling and re.search(rf"\b{re.escape(host)}\b", text))


@each_notebook
def test_every_picture_is_told_in_words(path: Path) -> None:
    for output in (output for cell in read(path) for output in cell["outputs"]):
        if "image/png" in output.get("data", {}):
            words = output["metadata"].get("image/png", {}).get("alt", "")
            assert len(words) > 20, f"{path.name}: execute the notebook again: a picture without its words"
        for picture in re.findall(r"<img [^>]*>", "".join(output.get("data", {}).get("text/html", ""))):
            assert re.search(r'alt="[^"]{20,}"', picture), picture[:80]


PAGE = 76  # columns that a printed page has for a cell's code: what is longer is cut off
GIVEN = {one.skeleton.strip() for one in EXERCISES}  # letter by letter those of zerosim/grading, in 120 columns


@each_notebook
def test_code_fits_on_a_page(path: Path) -> None:
    sources = ["".join(cell["source"]) for cell in read(path)]
    for source in (source for source in sources if source.strip() not in GIVEN and "step_into" not in source):
        for line in source.splitlines():
            assert len(line) <= PAGE, line


@each_notebook
def test_formulas_are_plain_text(path: Path) -> None:
    """The same in prose, outputs and pictures, and legible where nothing can be fetched that sets formulas."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            prose = re.sub(r"`[^`]*`", "", "".join(cell["source"]))
            assert not re.search(r"\$|\\[a-zA-Z(\[]|[\^_]\{|\u2212", prose), prose


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
