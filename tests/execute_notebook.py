"""execute_notebook.py NOTEBOOK OUT SECONDS: run a notebook from a clean kernel, in its own folder, and write what came.

A program of its own, so that what Jupyter's packages warn about and leave behind is not the test suite's.
Exit code 1 and one line on stderr (with the cell's number, from 1) for an error or when time is up.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat

from zerosim.lessons.executing import NotebookFailed, executed


def execute(source: Path, out: Path, seconds: float) -> None:
    """Raises: SystemExit for an error in a cell, and for the cell in which the notebook's time is up."""
    try:
        notebook, _ = executed(source, seconds)
    except NotebookFailed as failed:
        sys.exit(str(failed))
    nbformat.write(notebook, out)


if __name__ == "__main__":
    import matplotlib.font_manager  # noqa: F401  its first import on a machine prints a line: here, not in a cell

    execute(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
