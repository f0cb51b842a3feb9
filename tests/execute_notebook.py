"""execute_notebook.py NOTEBOOK OUT SECONDS: run a notebook from a clean kernel, in its own folder, and write what came.

A program of its own, so that what Jupyter's packages warn about and leave behind is not the test suite's.
Exit code 1 and one line on stderr (with the cell's number, from 1) for an error or when time is up.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError


def execute(source: Path, out: Path, seconds: float) -> None:
    """Raises: SystemExit for an error in a cell, and for the cell in which the notebook's time is up."""
    notebook = nbformat.read(source, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(source.parent)}}
    )
    with client.setup_kernel():
        began = time.monotonic()
        for index, cell in enumerate(notebook.cells):
            left = seconds - (time.monotonic() - began)
            client.timeout = max(1, round(left))
            try:
                client.execute_cell(cell, index)
            except CellTimeoutError:
                left = -1.0
            except CellExecutionError as error:
                plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
                sys.exit(f"cell {index + 1} fails: {plain}")
            if left < 0 or time.monotonic() - began > seconds:
                sys.exit(f"cell {index + 1} takes the notebook beyond its {seconds:g} seconds")
    nbformat.write(notebook, out)


if __name__ == "__main__":
    import matplotlib.font_manager  # noqa: F401  its first import on a machine prints a line: here, not in a cell

    execute(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
