"""Jobs that pages of docs/ show: commands, and lines of their answers."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = ("ten_jobs.md", "zeropp.md", "frameworks.md")
TEXT = "".join((Path(__file__).parent.parent / "docs" / name).read_text("utf-8") for name in PAGES)
JOBS: list[tuple[str, str]] = re.findall(r"```console\n\$ (zerosim [^\n]*)\n(.*?)```", TEXT, re.DOTALL)
ADVICE = {
    command.removeprefix("zerosim advise "): text
    for command, text in JOBS
    if re.match(r"zerosim advise .*(--gpus [1-8]x|--node )", command)
}
"""Searches on one node: cli/test_advise.py makes each once, for its page too."""


def fits(text: str) -> bool:
    return not text.startswith(("Does not fit", "Nothing fits"))


def assert_shown(text: str, printed: str, code: int) -> None:
    """A page shows these lines of the answer, in this order."""
    wanted = [line for line in text.splitlines() if line.strip() and line != "..."]
    assert [line for line in printed.splitlines() if line in wanted] == wanted
    assert code == (0 if fits(wanted[0]) else 3) or "..." in text.splitlines()[0]
