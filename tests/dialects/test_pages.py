"""The tables of names in docs/from_*.md are the readers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
from dialects.tables import pages

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", list(pages()))
def test_a_page_has_its_readers_table(name: str) -> None:
    page = (DOCS / f"{name.partition(',')[0]}.md").read_text("utf-8")
    table = page.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->\n")[0]
    assert table == pages()[name], "run: PYTHONPATH=tests python tests/dialects/tables.py"
