"""An answer's control characters never reach the terminal: not by a print, an exception, a name, a file's name."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from forty import body, solution
from grading_here import grade_source

from zerosim.cli.main import main
from zerosim.grading.crashes import lost
from zerosim.grading.plain import packed, unpacked
from zerosim.grading.report import Grade, brief
from zerosim.grading.results import gradescope, values
from zerosim.grading.verdict import VERDICTS, Check, Verdict

RED = "\x1b[31m"
ALL = f"{RED}\x07\x9b\u202e"
"""A colour, a bell, the one-letter form of its beginning, and what turns the direction of text."""

HEAD = solution("zero2").split("    def post")[0]
HOOK = "    def post_backward(self, unit):"
RAISES = body(HOOK, f"raise type({ALL!r}, (Exception,), {{}})({ALL!r})  # {RED}")
KEEPS = body(
    HOOK,
    f"with self.device.scope(unit={ALL!r}):",
    "    self.kept = [self.device.alloc((5000,), unit.flat.dtype, Kind.TEMP), *getattr(self, 'kept', ())]",
    "unit.flat.add_grad_shard(self.comm.reduce_scatter(unit.flat.take_grad(), purpose=" + repr(ALL) + "))",
)
SHOWS = f"class Odd:\n    def __repr__(self):\n        return {ALL!r}\n\n\n"
SHOWS += f"def slice_of(*sizes):\n    return Odd(), {{{ALL!r}: 1}}\n"
WRITES = f"def my_offload(*given):\n    return {ALL!r}, {ALL!r}, 'device'\n"

ANSWERS = [
    ("an exception, its type, and its line", "zero2", HEAD + RAISES, "\\x1b[31m"),
    ("a unit and a purpose", "zero2", "from zerosim.grading import Kind\n" + HEAD + KEEPS, "\\x1b[31m"),
    ("an object's own text", "bounds", SHOWS, "\\x1b[31m"),
    ("a text", "offload", WRITES, "expected one of 15 placements"),
]


def is_plain(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


def texts(value: Any) -> str:
    """Return the texts in a JSON value, a line each."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [str(value)]
    return "\n".join(texts(one) if isinstance(one, dict | list) else str(one) for one in inner)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("exercise", "source", "says"), [row[1:] for row in ANSWERS], ids=[row[0] for row in ANSWERS])
def test_a_report_spells_them_out(exercise: str, source: str, says: str) -> None:
    found = grade_source(source, exercise, name=f"hw{ALL}.py")
    assert says in str(found)
    for text in (str(found), brief(found), found._repr_html_()):
        assert is_plain(text)
    for data in (values(f"hw{ALL}.py", 0, [found.exercise], [found]), gradescope([found.exercise], [found])):
        assert is_plain(texts(data))


def test_what_another_process_forges_is_spelt_out() -> None:
    """A verdict's texts, and the lines that faulthandler writes, come from a process that may write anything."""
    found = grade_source("def slice_of(*sizes):\n    return 0, 1\n", "bounds")
    forged = unpacked(packed(Verdict((Check("runs", False, ALL, ALL, ALL, ALL, ALL),), void=ALL), VERDICTS), VERDICTS)
    assert is_plain(str(Grade(found.exercise, forged)))
    dump = ["Fatal Python error: Aborted", "Current thread 0x1", f'  File "hw{ALL}.py", line 3 in mine']
    assert is_plain(str(Grade(found.exercise, lost(found.exercise, "", dump, -6, [f"hw{ALL}.py"], 1.0))))


@pytest.mark.slow
def test_a_command_spells_them_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pipe of messages is forged too. Python quotes what it warns of."""
    prints = body(
        "    def publish_params(self, flat):",
        f"print({ALL!r}, 'one\\ttwo')",
        f"import os, sys; sys.stderr.write({ALL!r}); os.write(3, {(ALL + chr(10)).encode()!r})",
        f"os.write(3, {(json.dumps(['runs', ALL]) + chr(10)).encode()!r})",
        "raise SystemExit(" + repr(ALL) + ")",
    )
    source = solution("zero2").split("    def publish")[0] + prints + f"\n\n\nWARNED = '\\{RED}'  # {ALL}\n"
    cells = [{"cell_type": "code", "source": text} for text in (source, f"!ls {ALL}", f"%%bash {ALL}", f"def ({ALL}")]
    folder = tmp_path / "hand_ins"
    folder.mkdir()
    names = [f"hw{ALL}.py", f"hw{ALL}.ipynb", f"broken{ALL}.py"]
    for name, text in zip(names, (source, json.dumps({"cells": cells}), f"def ({ALL}"), strict=True):
        (folder / name).write_text(text, "utf-8")
    verbose = ["--similar", "--verbose", "--json", "-", "--gradescope", str(tmp_path / "scores.json")]
    all_flags = (verbose, ["--json", "-"], [])
    each = (["grade", str(folder / name), *flags] for name, flags in zip(names, all_flags, strict=True))
    for words in (["grade", "--class", str(folder)], *each):
        main(words)
        out, err = capsys.readouterr()
        assert is_plain((out + err).replace("one\ttwo", "")), words
        if "--class" in words:
            rows = list(csv.reader(io.StringIO(out)))
            assert [row[0] for row in rows[1:]] == [name.encode("unicode_escape").decode() for name in sorted(names)]
        elif out:
            assert is_plain(texts(json.loads(out)))
            assert "\\x1b[31m" in err
            assert "one\ttwo" in err
    assert is_plain(texts(json.loads((tmp_path / "scores.json").read_text("utf-8"))))
