"""Run a notebook from a clean kernel, in its own folder. Needs nbclient, nbformat and ipykernel."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from zerosim.errors import InputError, ZerosimError

NEEDED = ("nbclient", "nbformat", "ipykernel")


class NotebookFailed(ZerosimError):
    """A cell raised an error, or the notebook took too long. The message names the cell, counted from 1."""

    exit_code = 1


def check_jupyter() -> None:
    """Check for Jupyter. Raises: InputError if a package is missing, with the command that installs it."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"{', '.join(missing)} not installed: pip install jupyterlab {' '.join(missing)}")


def executed(source: Path, seconds: float) -> tuple[Any, float]:
    """Run a notebook and return it with its outputs, and the seconds that it took.

    Raises: NotebookFailed for an error in a cell, and for the cell in which the notebook's time is up.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    notebook = nbformat.read(source, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    folder = {"metadata": {"path": str(source.parent)}}
    client = NotebookClient(notebook, kernel_name="python3", record_timing=False, resources=folder)
    with client.setup_kernel(stderr=subprocess.DEVNULL):  # messages of its libraries, not of cells
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
                raise NotebookFailed(f"cell {index + 1} fails: {plain}") from None
            if left < 0 or time.monotonic() - began > seconds:
                raise NotebookFailed(f"cell {index + 1} takes the notebook beyond its {seconds:g} seconds")
        return notebook, time.monotonic() - began
