"""What a program can hold of plain English. A person holds the rest: `python tests/english/draw.py SEED`."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.english.sentences import ROOT, Sentence, sentences

MOST_WORDS = 35
"""Of a printed sentence."""

GONE = (
    r"under way",  # in flight
    r"(is|are|was|were) to be (had|found)",
    r"so many times",
    r"for (its|their) sake",
    r"own part",  # local shard
    r"made again",  # recomputed
    r"micro-batches",  # microbatches; --micro-batch is a flag
    r"whoever",
    r"what is outside",
    r"all that cannot differ",
    r"it is no more than",
    r"comes? true",
)
"""Words and turns that nobody has to read twice any more."""

VERBS = frozenset(
    re.findall(
        r"\w+",
        """
        accept accumulate add adjust advance advise agree allocate announce append apply ask assemble assign average
    begin borrow break bring broadcast build call carry cast change check choose clear close collect combine compare
    compute conclude continue convert copy count create cut decide declare decode dequantize describe diagnose
    divide do draw dress drop encode end enter estimate evaluate examine exchange execute explain export extend
    extrapolate feed fetch fill filter find finish flatten fold forget format forward free gather generate get give
    go grade grant group guess hand handle hash hold ignore index initialize insert install join judge keep launch
    lay leave let list load look make map mark match measure merge mix move multiply name normalize note open order
    pair parse pass perform place plan play postpone predict prefetch prepare print publish put quantize raise read
    receive recompute record reduce refuse register rehearse release remove render reorder replace report reserve
    reset reshape reshard rest resume return rotate round run sample save say scale search see send set shorten show
    simulate skip sleep sort split start stay step stop store stream subtract sum summarise swap take tell test time
    train transpose traverse try undo unshard update upload use view visit wait wake walk watch widen wrap write
    yield
    """,
    )
)
"""What a public function's docstring begins with."""


@pytest.fixture(scope="module")
def said() -> list[Sentence]:
    return list(sentences())


def test_words_that_are_gone_stay_gone(said: list[Sentence]) -> None:
    pattern = re.compile("|".join(rf"\b(?:{words})\b" for words in GONE), re.IGNORECASE)
    found = [f"{one.place}: {one.text}" for one in said if pattern.search(one.text)]
    assert found == []


def test_no_printed_sentence_is_long(said: list[Sentence]) -> None:
    printed = (one for one in said if one.room == "printed" and not one.text.startswith("<"))
    pieces = ((one.place, piece) for one in printed for piece in re.split(r"(?<=[.?!])\s+|; |\n", one.text))
    long = [f"{place}: {piece}" for place, piece in pieces if len(piece.split()) > MOST_WORDS and not is_names(piece)]
    assert long == []


def is_names(text: str) -> bool:
    """Return whether it is a list of keys, no sentence."""
    words = text.split()
    return sum("_" in word or word.startswith("--") for word in words) > len(words) / 3


def public_functions() -> Iterator[tuple[str, str]]:
    """Yield the place of each public function that has a docstring, and the docstring."""
    for path in sorted((ROOT / "zerosim").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(("zerosim/backends/", "zerosim/grading/given/")):  # equations: of kernels, of exercises
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for one in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
                if not isinstance(one, ast.FunctionDef) or one.name.startswith("_") or _is_property(one):
                    continue
                if doc := ast.get_docstring(one):
                    yield f"{name}:{one.lineno} {one.name}", doc


def _is_property(one: ast.FunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in one.decorator_list)


def test_docstrings_of_public_functions_begin_with_a_verb() -> None:
    found = list(public_functions())
    assert len(found) > 1500
    without = [f"{place}: {doc}" for place, doc in found if re.split(r"\W", doc, maxsplit=1)[0].lower() not in VERBS]
    assert without == []


def test_the_glossary_defines_each_word_once() -> None:
    rows = re.findall(r"^\| ([^|]+?) \| [^|]+\|$", (ROOT / "docs/glossary.md").read_text("utf-8"), re.MULTILINE)
    words = [word for row in rows if row not in ("word", "---") for word in row.split(", ")]
    assert len(words) > 80
    assert [word for word, times in Counter(words).items() if times > 1] == []
