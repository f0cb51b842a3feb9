"""Homework: a skeleton is written, a file is read, and what it earns follows from its answers alone."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import finished, posix

from zerosim.cli.grade import _fitted
from zerosim.cli.main import main
from zerosim.grading import EXERCISES, Grade, find_exercise
from zerosim.grading.handin import read
from zerosim.grading.homework import skeleton
from zerosim.grading.process import judged_source
from zerosim.grading.results import gradescope
from zerosim.grading.variants import variant
from zerosim.grading.verdict import Check, Verdict

SOLUTIONS = Path(__file__).parents[2] / "notebooks" / "solutions"
ZERO2 = (SOLUTIONS / "zero2.py").read_text("utf-8")

BROKEN = json.dumps({"cells": [{"cell_type": "code", "source": "class MyZero2(:"}]})

ANSWERS = [
    ("right", ZERO2, 0, "solved"),
    ("right, calls at the top level", ZERO2 + "\nprint('x')\nimport os\nos._exit(0)\n", 0, "solved"),
    ("forgets to publish", ZERO2[: ZERO2.index("    def publish")], 7, "[no] weights"),
    ("a name that is not", ZERO2.replace("unit.flat.add", "unti.flat.add"), 7, "NameError"),
    ("ends the process", ZERO2.replace("if unit", "import os; os._exit(0)\n        if unit"), 7, "0 of 6"),
    ("raises when read", ZERO2.replace("keeps_grads = False", "keeps_grads = 1 / 0"), 7, "ZeroDivisionError"),
    ("raises where nothing needs it", ZERO2 + "\nx = 1 / 0\n", 0, "solved"),
    ("prints a verdict", ZERO2.split("    keeps")[0] + "    print('[\"verdict\", \"x\"]')\n", 7, "0 of 6"),
    ("zerosim's own", "from zerosim.grading import Zero2\nclass MyZero2(Zero2):\n    pass\n", 7, "write it yourself"),
    ("patches the grader", ZERO2.split("    keeps")[0] + "    import zerosim.grading.report as r\n"
     "    r.Grade.passed = True\n", 7, "0 of 6"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("source", "code", "words"), [row[1:] for row in ANSWERS], ids=[row[0] for row in ANSWERS])
def test_what_an_answer_earns(
    source: str, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hw.py"
    file.write_text(source, "utf-8")
    assert main(["grade", str(file)]) == code
    out = capsys.readouterr().out
    assert words in out
    assert out.count("found:") == (code == 7 and "write it" not in words)  # the root cause alone is shown in full


@pytest.mark.slow
def test_a_notebook_is_graded_and_its_magics_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "hw.ipynb", tmp_path / "out.json"
    code = (
        ["%matplotlib inline\n", "!ls\n", "files = !ls\n", "plan?\n"],
        ZERO2,
        "def (:",
        "%%bash\nrm -r %x",
        "x = 3 % 2",
    )
    cells = [{"cell_type": "code", "source": source} for source in code]
    file.write_text(json.dumps({"cells": cells}), "utf-8")
    assert main(["grade", str(file), "--gradescope", str(out), "--seed", "3"]) == 0
    magics = "%matplotlib inline, !ls, files = !ls, plan?"
    said = f"skipped: {magics}, code cell 3, line 1: is not Python: invalid syntax, %%bash\n"
    assert said in capsys.readouterr().out
    tests = {test["name"]: test for test in json.loads(out.read_text("utf-8"))["tests"]}
    assert len(tests) == len(EXERCISES)
    assert tests["Exercise 5, ZeRO-2"]["score"] == tests["Exercise 5, ZeRO-2"]["max_score"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["Nehalem", "Haswell"])
def test_blas_kernels_chosen_here_cost_no_point(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hand-in gets none of this process's variables, so its reference may get none either: bits depend on them."""
    monkeypatch.setenv("OPENBLAS_CORETYPE", kernel)
    one = variant(find_exercise("zero2"), 3)
    found = Grade(one, judged_source("hw.py", ZERO2, one, 3))
    assert found.passed, str(found)


@pytest.mark.parametrize("one", EXERCISES, ids=lambda one: one.name)
def test_a_skeleton_is_python_and_names_its_answer(one: object, capsys: pytest.CaptureFixture[str]) -> None:
    name, given = one.name, one.given.__name__  # type: ignore[attr-defined]
    assert main(["homework", name]) == 0
    space: dict[str, object] = {"__name__": "hw"}
    exec(compile(capsys.readouterr().out, "hw.py", "exec"), space)
    assert given in space


def test_an_answer_belongs_to_one_exercise() -> None:
    names = [one.given.__name__ for one in EXERCISES]
    assert len(set(names)) == len(names)


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["grade", "nowhere.py"], "cannot read nowhere.py: No such file"),
        (["grade", "empty.py"], "cannot read empty.py: it is empty"),
        (["grade", "words.py"], "contains no answer"),
        (["grade", "."], "is a folder; zerosim grade --class . grades"),
        (["grade", "hw.py", "--exercise", "99"], f"expected 1 to {len(EXERCISES)}"),
        (["grade", "hw.py", "--exercise", "6"], "such as MyZero3 (exercise zero3)"),
        (["grade", "bad.ipynb"], "is not a notebook"),
        (["grade", "broken.ipynb"], "contains no answer"),
        (["grade", "broken.ipynb"], "code cell 1, line 1: is not Python"),
        (["grade", "bad.py"], "line 1: is not Python"),
        (["grade", "hw.py", "--exercise", "zero22"], "did you mean zero2"),
        (["grade", "hw.py", "--seed", "-1"], "expected 0 to"),
        (["grade"], "expected either FILE or --class"),
        (["grade", "--class", "nowhere"], "cannot be read"),
        (["grade", "--class", ".", "--json", "x.json"], "leave out --json"),
        (["grade", "hw.py", "--published", "nowhere"], "contains no script"),
        (["grade", "hw.py", "--path", "hours"], "did you mean hour?"),
        (["homework", "zero22"], "did you mean zero2"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "empty.py": "",
        "words.py": "x = 1",
        "bad.ipynb": "[]",
        "broken.ipynb": BROKEN,
        "bad.py": "def (:",
        "hw.py": ZERO2,
    }.items():
        Path(name).write_text(text, "utf-8")
    assert main(words) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_a_long_line_goes_on_below_its_own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "40")
    text = "Exercise 5\n  [no] bytes     expected " + "word " * 8 + "\n       hint:   " + "more " * 8
    fitted = _fitted(text, Terminal()).splitlines()
    assert max(map(len, fitted)) < 40
    assert [len(line) - len(line.lstrip()) for line in fitted] == [0, 2, 17, 17, 7, 15]
    assert " ".join(" ".join(fitted).split()) == " ".join(text.split())
    assert _fitted(text, io.StringIO()) == text


TABLE = """
import sys
from zerosim.grading import classroom
classroom.own_parts = list  # it takes long
print(classroom.class_table(sys.argv[1], None, 0, sys.argv[2]), end="")
"""


@pytest.mark.slow
@posix
def test_an_entry_of_a_class_that_is_no_file_is_a_row_and_nothing_waits_for_it(tmp_path: Path) -> None:
    folder, published = tmp_path / "hand-ins", tmp_path / "published"
    (folder / "folder.py").mkdir(parents=True)
    published.mkdir()
    (published / "zero2.py").write_text(ZERO2, "utf-8")
    for pipe in (folder / "pipe.ipynb", published / "pipe.py"):
        os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket.py"))
    for name, target in (("device.py", "/dev/zero"), ("terminal.py", "/dev/stdin"), ("gone.py", "nowhere")):
        (folder / name).symlink_to(target)
    done = finished([sys.executable, "-c", TABLE, folder, published], stdin=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")
    assert {tuple(row) for row in csv.reader(done.stdout.splitlines())} == {
        ("file", "remarks", "similar"),
        ("device.py", "cannot read device.py: it is a device, expected a file", ""),
        ("folder.py", "folder.py: is a folder; zerosim grade --class folder.py grades every file in it", ""),
        ("gone.py", "cannot read gone.py: No such file or directory", ""),
        ("pipe.ipynb", "cannot read pipe.ipynb: it is a pipe, expected a file", ""),
        ("socket.py", "cannot read socket.py: it is a socket, expected a file", ""),
        ("terminal.py", "cannot read terminal.py: it is a pipe, expected a file", ""),
    }


@pytest.mark.slow
def test_a_class_is_a_table_and_a_broken_file_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in {
        "=ann.py": ZERO2,
        "bob.py": "def (:",
        "eve.py": "from os import _exit\n" + ANSWERS[4][1],
    }.items():
        (tmp_path / name).write_text(text, "utf-8")
    assert main(["grade", "--class", str(tmp_path), "--path", "hour"]) == 0
    rows = list(csv.reader(capsys.readouterr().out.splitlines()))
    assert rows[0] == ["file", "zero2", "path hour, version 1, of 100", "remarks", "similar"]
    assert rows[1][:4] == ["'=ann.py", "6/6", "50.0", ""]
    assert rows[2][:3] == ["bob.py", "", ""]
    assert "is not Python" in rows[2][3]
    assert rows[2][3].startswith("bob.py, line 1: is not Python")
    assert rows[3][:3] == ["eve.py", "0/6", "0.0"]
    assert rows[3][3].startswith("zero2: runs: in step 0")


def _squeezed(text: str) -> str:
    return " ".join(text.split())


NOT_THE_TASK = (
    r"Runs:|Volume|Notebook 11 explains|\*\*Guess first|The solution|Solutions are|Which of these does"
    r"|Nothing is trained|This exercise shows|Now a strategy|With 10 elements|A student's first|The stage that"
    r"|In exercise 6|GPT-2 shares|The last one to write|From here on|Here you write|The paper counts|`Action` is"
    r"|The grade trains with your list"
)
"""How sentences begin that lead to a task, or that the file has in other words: its runs and volume."""


def test_a_file_has_every_sentence_of_the_notebooks_task() -> None:
    tasks = {}
    for path in sorted(SOLUTIONS.parent.glob("*.ipynb")):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        parts = "\n".join("".join(cell["source"]) if cell["cell_type"] == "markdown" else "## code" for cell in cells)
        for number, text in re.findall(r"^## Exercise (\d+)\.[^\n]*\n(.*?)(?=^<details|^## |\Z)", parts, re.M | re.S):
            tasks[int(number)] = path.stem, text
    for one in EXERCISES:
        file = _squeezed(skeleton(one))
        notebook, text = tasks[one.number]
        assert one.notebook == notebook
        for sentence in re.split(r"(?<=[.?!:])\s+(?=[A-Z`*(ρ])", _squeezed(text.split("```")[0])):
            assert re.match(NOT_THE_TASK, sentence) or sentence in file, (one.name, sentence)


def test_a_file_has_the_words_of_the_api_that_its_solution_uses() -> None:
    for one in EXERCISES:
        text = (SOLUTIONS / f"{one.name}.py").read_text("utf-8")
        used = set(re.findall(r"(?:comm|flat|unit|node|updater|now)\.(\w+)", text))
        used |= set(
            re.findall(r"\b(launch_\w+|norm_partials|total_norm|(?:Input|Weight)Grad|Forward|Backward)\b", text)
        )
        given = skeleton(one).replace("from zerosim.grading import", "")
        assert not {name for name in used if not re.search(rf"\b{name}\b", given)}, one.name


def test_names_are_listed_and_a_file_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["homework"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [one.name for one in EXERCISES]
    file = tmp_path / "hw.py"
    assert main(["homework", "zero2", "--seed", "7", "-o", str(file)]) == 0
    assert file.read_text("utf-8") == skeleton(find_exercise("zero2"), 7)
    assert main(["homework", "zero9", "-o", str(tmp_path / "no.py")]) == 2
    assert not (tmp_path / "no.py").exists()
    file.write_text(answer := skeleton(find_exercise("zero2"), 7) + "# mine\n", "utf-8")
    assert main(["homework", "zero2", "--seed", "7", "-o", str(file)]) == 2
    assert "exists and has another text" in capsys.readouterr().err
    assert file.read_text("utf-8") == answer


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_is_read(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "hw.py").write_text("# é\n" + ZERO2, encoding)
    assert [one.name for one in read(str(tmp_path / "hw.py")).exercises] == ["zero2"]


@pytest.mark.parametrize(
    "content", [b"class MyZero2(:", b"\xff\xfe\xfd", b"x = 1\n"], ids=["broken", "bytes", "no answer"]
)
def test_a_hand_in_that_cannot_be_graded_has_a_result(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "hw.py").write_bytes(content)
    scores, figures = tmp_path / "scores.json", tmp_path / "figures.json"
    assert main(["grade", str(file), "--gradescope", str(scores), "--json", str(figures)]) == 2
    assert len(error := capsys.readouterr().err.strip().splitlines()) == 1
    found, data = json.loads(scores.read_text("utf-8")), json.loads(figures.read_text("utf-8"))
    assert data["error"]
    assert data["error"] == found["output"]
    assert data["error"] in error[0]
    assert (data["score"], data["grades"]) == (0.0, [])
    assert [row["score"] for row in found["tests"]] == [0.0] * len(EXERCISES)
    assert sum(row["max_score"] for row in found["tests"]) == data["most"] == sum(one.weight for one in EXERCISES)


def test_the_most_does_not_depend_on_what_was_handed_in() -> None:
    bounds, ddp = find_exercise("bounds"), find_exercise("ddp")
    unsolved = [Grade(one, Verdict((Check("answer", False),))) for one in (bounds, ddp)]
    for grades in ([], unsolved[:1], unsolved):
        rows = gradescope(EXERCISES, grades)["tests"]
        assert [row["max_score"] for row in rows] == [one.weight for one in EXERCISES]
