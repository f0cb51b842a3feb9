"""`--help` shows the flags that most people need, `--help-all` every flag, and no line is wider than a terminal."""

from __future__ import annotations

import re

import pytest

from zerosim.cli.help import USUAL
from zerosim.cli.main import VERBS, main
from zerosim.cli.parser import flag_of
from zerosim.config import OPTIONS
from zerosim.config.parts.clock import CLOCK

PAGES = [(), *((verb,) for verb in VERBS), ("export", "memory")]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", USUAL)
def test_help_shows_fifteen_flags_and_help_all_the_rest(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    short, long = printed(capsys, verb, "--help"), printed(capsys, verb, "--help-all")
    shown = re.findall(r"^  (--[a-z-]+)", short, re.MULTILINE)
    assert shown == [*map(flag_of, USUAL[verb].split()), "--help-all"]
    assert len(shown) == 15 + 1
    every = set(re.findall(r"--[a-z][a-z0-9-]*", long))
    assert set(shown) <= every
    assert int(re.search(r"the other (\d+) flags", short)[1]) > 80  # type: ignore[index]
    if verb != "plan":
        assert {flag_of(name) for name in OPTIONS} - every == set(map(flag_of, CLOCK))


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_no_line_is_wider_than_80_columns(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for flag in ("--help", "--help-all")[: len(words) + 1]:
        assert max(map(len, printed(capsys, *words, flag).splitlines())) <= 80
