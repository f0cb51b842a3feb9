"""The site: all of docs/ and all notebooks are on it; links lead to the site, to the project, or nowhere."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
URL = "https://github.com/somebody/zerosim"


@pytest.fixture(scope="module")
def build() -> Any:
    pytest.importorskip("sphinx")
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs/site/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_and_notebook_is_on_the_site(build: Any, tmp_path: Path) -> None:
    build.lay_out(tmp_path)
    for path in (*(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")):
        assert len(list(tmp_path.rglob(path.name))) == 1, path.name
    for path in tmp_path.rglob("*.md"):
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", path.read_text("utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
    for path in tmp_path.rglob("*.ipynb"):
        prose = "".join("".join(c["source"]) for c in json.loads(path.read_text("utf-8"))["cells"])
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+\.(?:md|ipynb))", prose):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_a_lesson_that_steps_has_a_player_beside_the_text(build: Any, tmp_path: Path) -> None:
    build.lay_out(tmp_path)
    texts = {path.stem: path.read_text("utf-8") for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {name for name, text in texts.items() if "zerosim.debug(" in text} <= set(build.PLAYERS) <= set(texts)
    for name in build.PLAYERS:
        cells = json.loads((tmp_path / f"course/{name}.ipynb").read_text("utf-8"))["cells"]
        frames = [at for at, cell in enumerate(cells) if "<iframe" in "".join(cell["source"])]
        assert frames == [1]
        (source,) = re.findall(r'<iframe src="([^"]+)"', "".join(cells[1]["source"]))
        page = (tmp_path / "extra" / "course" / source).resolve()  # the site's own folder is where `extra` is copied
        assert '"schema":"zerosim-player"' in page.read_text("utf-8")


def test_every_picture_of_a_notebook_has_its_words(build: Any) -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(build.with_alts(path.read_text("utf-8")))["cells"]:
            drawn = [output for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})]
            assert len(drawn) <= 1  # MyST-NB has one text for all pictures of a cell
            if drawn:
                words = cell["metadata"]["mystnb"]["image"]["alt"]
                assert words == drawn[0]["metadata"]["image/png"]["alt"]
                assert len(words) > 20


def test_links_follow_a_page_to_its_place(build: Any) -> None:
    at = build.pages()
    to = build.relinked("docs/homework.md", at["docs/homework.md"], at, None)
    assert to("[how](counting.md#bits), [code](../zerosim/verbs.py)") == "[how](../reference/counting.md#bits), code"
    to = build.relinked("docs/homework.md", at["docs/homework.md"], at, URL)
    assert to("[code](../zerosim/verbs.py)") == f"[code]({URL}/blob/main/zerosim/verbs.py)"
    assert to("[paper](https://arxiv.org)") == "[paper](https://arxiv.org)"
