"""What a notebook's own cells define, for tests of it without running the whole notebook."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
Defined = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def defined() -> Defined:
    """`defined("03", "01", "05")`: the names after cells 01 and 05 of notebook 03 have run; more may be given first."""

    def run(notebook: str, *ids: str, **names: Any) -> dict[str, Any]:
        (path,) = NOTEBOOKS.glob(f"{notebook}_*.ipynb")
        cells = {cell["id"]: "".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]}
        for id in ids:
            exec(cells[f"cell-{id}"], names)
        return names

    return run
