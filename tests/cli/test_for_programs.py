"""docs/for_programs.md and the JSON that it describes: every key is named there, and the parts of a step add up."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zerosim.cli.main import main
from zerosim.ledger.memory import MARKS
from zerosim.report.names import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "for_programs.md").read_text("utf-8")
SMALL = "--layers 2 --hidden 16 --heads 2 --seq 8 --ranks 2 --json -"
COMMANDS = {
    "offload": f"plan {SMALL} --gpu a100-80 --offload optimizer=host,params=host --overlap all",
    "allocator": f"plan {SMALL} --gpu h100-80 --stage 2 --allocator caching --lazy-states --accumulate 4",
    "pipeline": f"plan {SMALL} --gpu a100-80 --stage 1 --pp 2 --recipe megatron",
    "unfit": f"plan {SMALL} --limit 1KB",
    "run": f"run {SMALL} --steps 1 --recompute full --cpu-checkpointing -q",
}
BY_NAME = ("config", "set_aside", "mesh", "coordinates", "outside", "exposed_s", "states")
"""Entries whose own keys are options, axes of the mesh, or names of the run."""


def written(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the command writes as JSON."""
    assert main(COMMANDS[name].split()) in (0, 3)
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def keys(value: Any) -> Iterator[str]:
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield name
        yield from () if name in BY_NAME else keys(inner)
    for inner in value if isinstance(value, list) else ():
        yield from keys(inner)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_names_every_key(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    named = set(re.findall(r"`(\w+)`", PAGE)) | KINDS.keys()
    assert {key for key in keys(written(name, capsys)) if key not in named} == set()
    assert set(MARKS) <= named


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if "--gpu" in command])
def test_a_step_is_the_sum_of_the_parts_that_the_page_lists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    time = written(name, capsys)["time"]
    listed = re.search(r"`step_s` is the sum of its parts on the `rank` that ends last: (.*?)\. ", PAGE)
    assert listed is not None
    parts = re.findall(r"`(\w+)`", listed[1])
    assert len(parts) == 7
    assert set(parts) - {"cpu_s"} <= time.keys()
    assert ("cpu_s" in time) == (name == "offload")
    seconds = [time.get(part, 0.0) for part in parts]
    total = math.fsum(sum(one.values()) if isinstance(one, dict) else one for one in seconds)
    assert total == pytest.approx(time["step_s"], rel=1e-9)  # sums of floats in another order
