"""--allocator and --allocator-conf, from flags and scenarios: figures, and how a run ends that does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerosim.cli.main import main

SIZES = ["--layers", "4", "--hidden", "32", "--heads", "4", "--seq", "32", "--ranks", "2", "--stage", "3"]
SMALL = [*SIZES, "--steps", "1", "--attention", "flash", "--recompute", "full"]


def plan_values(capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> dict[str, object]:
    assert main(["plan", *SMALL, "--saves", "lean", *flags, "--quiet", "--json", "-"]) == code
    values: dict[str, object] = json.loads(capsys.readouterr().out)
    return values


def test_a_plan_fits_by_what_is_reserved(capsys: pytest.CaptureFixture[str]) -> None:
    exact = plan_values(capsys)
    peak = exact["peak_bytes"]
    tight = ("--limit", str(peak))
    assert plan_values(capsys, *tight)["fits"] is True
    arena = plan_values(capsys, *tight, "--allocator", "arena")
    assert (arena["fits"], arena["peak_bytes"]) == (True, peak)
    without = plan_values(capsys, *tight, "--allocator", "arena", "--allocator-conf", "defragment:False", code=3)
    assert (without["fits"], without["peak_bytes"]) == (False, peak)
    assert str(without["advice"]).startswith("--allocator-conf defragment:True would fit")
    caching = plan_values(capsys, *tight, "--allocator", "caching", code=3)
    assert caching["fits"] is False


def test_running_out_of_memory_says_why_and_what_helps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", *SMALL, "--quiet", "--json", "-"]) == 0
    peak = max(rank["memory"]["peak"]["bytes"] for rank in json.loads(capsys.readouterr().out)["ranks"])
    scenario = tmp_path / "arena.toml"
    text = f'allocator = "arena"\nallocator_conf = "defragment:False"\ncapacity = {peak}\n'
    scenario.write_text(text, encoding="utf-8")
    assert main(["run", str(scenario), *SMALL, "--quiet"]) == 3
    said = " ".join(capsys.readouterr().err.split())
    for words in (
        "the largest hole",
        "were free",
        "Held most:",
        "optim of",
        "What may help: --allocator-conf defragment",
    ):
        assert words in said
    assert "Tried for you: --allocator-conf defragment:True would fit" in said
    assert main(["run", str(scenario), *SMALL, "--allocator-conf", "fit:first"]) == 0
    assert "were moved in" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("allocator", ["caching", "arena"])
def test_an_answer_is_a_plan_of_the_same_flags(allocator: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU too, whose time is that of a plan with the allocator and its capacity."""
    flags = ["--model", "gpt", *SIZES[:-4], "--gpu", "a100-40", "--reserve", "42.25GB", "--allocator", allocator]
    assert main(["fit", *flags, "--json", "-", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    for tried, code in ((found["best"], 0), (found["beyond"], 3)):
        again = ["plan", *flags, "--micro-batch", str(tried["value"]), "--json", "-", "--quiet"]
        assert main(again) == code
        taken = [rank["memory"]["peak"].get("reserved_bytes") for rank in json.loads(capsys.readouterr().out)["ranks"]]
        assert code or max(taken) == tried["peak_bytes"]
    assert main(["fit", *flags]) == 0
    assert "the allocator takes" in " ".join(capsys.readouterr().out.split())


def test_a_reserve_of_more_than_a_device_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["fit", *SIZES, "--limit", "1GB", "--reserve", "2GB", "--allocator", "caching"]
    assert main(flags) == 3
    assert "needs at least" in " ".join(capsys.readouterr().out.split())


def test_other_pictures_do_not_depend_on_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plot", "memory", *SMALL, "--allocator", "caching", "-o", str(tmp_path / "a.svg")]) == 2
    assert "plot addresses" in capsys.readouterr().err
