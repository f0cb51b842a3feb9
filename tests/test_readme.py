"""README, docs/ and CONTRIBUTING: their commands exist, their Python runs, their links lead somewhere, and the numbers
that the README shows are those of a run."""

from __future__ import annotations

import ast
import hashlib
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from page_jobs import ADVICE, JOBS, assert_shown

from zerosim.cli.main import main
from zerosim.train.data import primer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PAGES = {
    path.name: path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}
PYTHON = [
    pytest.param(block, id=f"{name}-{index}", marks=() if "zerosim.debug(" in block else pytest.mark.slow)
    for name, path in PAGES.items()
    for index, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.DOTALL))
]

each_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


def shown(command: str) -> list[str]:
    """The lines that the README shows under a command."""
    block = README.split(f"$ {command}\n")[1].split("```")[0].split("\n$ ")[0]
    return [line for line in block.splitlines() if line.strip() and line != "..."]


@pytest.mark.slow
@pytest.mark.bits
def test_the_first_command_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes to the last digit; losses may differ in a digit between BLAS libraries, but must fall as far."""
    command = "zerosim run --stage 3 --ranks 4"
    assert main(command.split()[1:]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    for line in shown(command):
        if "loss" not in line.lower():
            assert line in lines
        elif "step" in line:
            assert any(other.startswith(line.partition("loss")[0]) for other in lines), line
    first, last = (float(x) for x in re.search(r"Loss (\d+\.\d+) → (\d+\.\d+)", printed).groups())  # type: ignore[union-attr]
    assert last < first - 2.5


@pytest.mark.bits
def test_compare_shows_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    command = "zerosim compare --stages 0,1,2,3 --ranks 4"
    assert main([*command.split()[1:], "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in shown(command):
        if "loss" not in line.lower():
            assert line in lines


@pytest.mark.bits
def test_the_plan_is_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    command = re.search(r"\$ (zerosim plan .*)", README)[1]  # type: ignore[index]
    assert main(command.split()[1:]) == 3  # it does not fit
    lines = capsys.readouterr().out.splitlines()
    assert len(shown(command)) > 10
    for line in shown(command):
        assert line in lines


OTHERS = [(command, text) for command, text in JOBS if command.removeprefix("zerosim advise ") not in ADVICE]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "text"), OTHERS, ids=[command for command, _ in OTHERS])
def test_a_job_prints_what_its_page_shows(command: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(shlex.split(command)[1:])
    assert_shown(text, capsys.readouterr().out, code)


@pytest.mark.slow
@pytest.mark.bits
def test_commands_of_the_page_on_checkpoints_print_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other in one folder, as a reader types them."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```console\n(.*?)```", read(PAGES["checkpoints.md"]), re.DOTALL)
    commands = [one for block in blocks for one in re.findall(r"\$ (zerosim .*)\n([^$]*)", block)]
    assert len(commands) > 10
    for command, text in commands:
        assert main(shlex.split(command)[1:]) == 0, command
        lines = capsys.readouterr().out.splitlines()
        wanted = [line for line in text.splitlines() if line.strip() and line != "..."]
        assert [line for line in lines if line in wanted] == wanted, command


def test_the_page_has_ten_jobs() -> None:
    assert len(re.findall(r"^## \d+\. ", PAGES["ten_jobs.md"].read_text("utf-8"), re.MULTILINE)) == 10
    assert len(JOBS) >= 10


def test_the_course_lists_every_notebook_in_its_order() -> None:
    listed = re.findall(r"\b(\d+)\. \[[^\]]*\]\(notebooks/(.*?)\)", README)
    there = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert listed == [(str(number), name) for number, name in enumerate(there, 1)]


def test_the_picture_is_that_of_the_command_beside_it(tmp_path: Path) -> None:
    """Both themes, text by text: how a letter is drawn is the reader's affair, and matplotlib's versions differ in
    what lies around it."""
    command = re.search(r"`zerosim (plot memory .*?) -o figure1.svg`", README)
    assert command is not None
    for theme, name in (("light", "figure1.svg"), ("dark", "figure1-dark.svg")):
        drawn = tmp_path / name
        assert main([*command[1].split(), "--theme", theme, "-o", str(drawn)]) == 0
        assert f"scenarios/{name}" in README
        assert texts(drawn) == texts(ROOT / "scenarios" / name)
        assert {"120 GB", "31.4 GB", "16.6 GB", "1.88 GB"} <= set(texts(drawn))


def texts(svg: Path) -> list[str]:
    """The title, and what can be read in the picture."""
    root, name = ET.parse(svg).getroot(), "{http://www.w3.org/2000/svg}"
    return ["".join(element.itertext()) for element in root.iter() if element.tag in (f"{name}title", f"{name}text")]


def test_the_staircase_says_in_words_what_its_file_says() -> None:
    """The words beside the moving picture have the figures that it was drawn with."""
    alt = re.search(r'<img alt="(ZeRO-3, moving: [^"]*)"', README)[1]  # type: ignore[index]
    said = next(text for text in texts(ROOT / "scenarios" / "staircase.svg") if text.startswith("At most"))
    assert re.findall(r"[\d.]+ KB", alt) == re.findall(r"[\d.]+ KB", said)


@pytest.mark.bits
@pytest.mark.parametrize("block", PYTHON)
def test_the_python_that_is_shown_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a notebook, which shows what the last line gives."""
    tree, names, shown = ast.parse(block), dict[str, object](), None
    *before, last = tree.body
    exec(compile(ast.Module(before, []), "a page", "exec"), names)
    if isinstance(last, ast.Expr):
        shown = eval(compile(ast.Expression(last.value), "a page", "eval"), names)
    else:
        exec(compile(ast.Module([last], []), "a page", "exec"), names)
    assert capsys.readouterr().out or shown is not None


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target, _, heading in (link.partition("#") for link in re.findall(r"\]\((?!http)([^)]+)\)", read(page))):
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not heading or heading in anchors(there), f"{target}#{heading}"


def test_the_readme_leads_to_every_page() -> None:
    for page in PAGES.values():
        assert page.name == "README.md" or f"({page.relative_to(ROOT).as_posix()})" in README


@each_page
def test_every_command_is_one_that_zerosim_knows(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in re.findall(r"^(?:(?:mpirun|srun) .*?)?\bzerosim\)? [a-z]+ ?.*$", code(page), re.MULTILINE):
        words = line[re.search(r"\bzerosim\)? ", line).start() :].split("#")[0].split()  # type: ignore[union-attr]
        verb = words[1:3] if words[1] in ("plot", "export", "page") else words[1:2]
        assert main([*verb, "--help-all"]) == 0
        known = capsys.readouterr().out
        assert all(flag in known for flag in words if flag.startswith("--")), line


def test_one_screen_is_enough_to_begin() -> None:
    assert len(README.splitlines()) <= 80
    blocks = re.findall(r"```\w+\n(.*?)```", README, re.DOTALL)
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 100  # a page shows no more of a block


def test_what_is_said_of_a_trillion_parameters_is_what_the_table_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "1t", "--stage", "3", "--ranks", "1024", "--recompute", "full", "--all"]) == 0
    printed = capsys.readouterr().out
    total = next(line.split()[-1] for line in printed.splitlines() if line.startswith("each of 1024 ranks"))
    said = re.search(r"so its states take ([\d.]+) GB", README)
    assert said is not None
    assert said[1] == f"{int(total.replace(',', '')) / 1e9:.2f}"


@pytest.mark.slow
def test_the_pipeline_that_is_shown_is_one_to_rent_gpus_for(capsys: pytest.CaptureFixture[str]) -> None:
    command = next(line for line in README.splitlines() if "--pp" in line and line.startswith("zerosim plan"))
    assert main(command.split()[1:]) == 0
    utilization = re.search(r"MFU ([\d.]+)", capsys.readouterr().out)
    assert utilization is not None
    assert float(utilization[1]) > 30


def read(page: Path) -> str:
    return page.read_text("utf-8")


def code(page: Path) -> str:
    """What stands in blocks for a shell."""
    return "\n".join(re.findall(r"```(?:sh|console)\n(.*?)```", read(page), re.DOTALL))


def anchors(page: Path) -> set[str]:
    """How GitHub calls a page's headings in links."""
    headings = re.findall(r"^#+ (.*)$", read(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_primer_stays_as_it_is() -> None:
    """Toys train on it: a letter changed changes every loss that the course and the pages show."""
    digest = hashlib.sha256(primer()).hexdigest()
    assert digest == "d173734f802294fe6128afef4cbbd091d84be56fa91ba1beba00cd24397c12ac"


def test_the_primer_is_prose_of_at_least_30_kb() -> None:
    assert len(primer()) >= 30_000
    assert max(primer()) < 128


def test_the_primer_begins_with_pictures_a_formula_and_a_command() -> None:
    page = ROOT / "zerosim" / "primer.md"
    first = " ".join(read(page).split(" ")[:300])
    assert all(found in first for found in ("16Ψ/N", "zerosim run --stage 3 --ranks 4"))
    pictures = re.findall(r"!\[([^\]]{20,})\]\((.*?)\)", first)
    assert len(pictures) == 2
    assert all((page.parent / path).is_file() for _, path in pictures)
