"""Real files of other frameworks, and what a reader must understand of each (`given/`, `FILE.expect.json`)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from zerosim.config import PLAN_DEFAULTS, RunConfig
from zerosim.dialects import Context, Reading, read

FOLDER = Path(__file__).parent / "given"
FILES = sorted(path.name.removesuffix(".expect.json") for path in FOLDER.glob("*.expect.json"))
_FLAGS = {"max_grad_norm": "clip_norm"}
_NO_FLAGS = ("launcher", "hidden", "note", "bf16", "optim")
"""Of an expectation's context, what no flag says."""
LAUNCHERS = {"transformers Trainer": "trainer", "accelerate": "accelerate", "deepspeed": "deepspeed"}


@cache
def expectation(name: str) -> dict[str, Any]:
    """Return what must be read of a file."""
    return json.loads((FOLDER / f"{name}.expect.json").read_text("utf-8"))


def flags_of(name: str) -> dict[str, Any]:
    """Return the flags that say an expectation's context."""
    context = expectation(name)["context"]
    given = {_FLAGS.get(key, key): value for key, value in context.items() if key not in _NO_FLAGS}
    if context.get("bf16"):
        given["precision"] = "bf16"
    return {key: value for key, value in given.items() if value != "as above"}


def reading_of(name: str, *without: str, **given: Any) -> Reading:
    """Read a file in its expectation's context, without these keys."""
    context = Context(
        given={**flags_of(name), **given}, launcher=LAUNCHERS.get(expectation(name)["context"]["launcher"], "")
    )
    return read([str(FOLDER / name)], context, without)


def config_of(reading: Reading, **given: Any) -> RunConfig:
    """Return the plan's configuration: a file's values with flags over them."""
    return RunConfig(**{**PLAN_DEFAULTS, **reading.values, **given})


def unlike(name: str, reading: Reading, changed: dict[str, Any], **given: Any) -> dict[str, tuple[Any, Any]]:
    """Return by option what differs from the expectation's `run` or `understood`: the expected value and ours.

    `changed`: options of which the expectation is known to be older, and our value.
    """
    expected = expectation(name)["run"] or expectation(name)["understood"]
    theirs = {key: tuple(one) if isinstance(one, list) else one for key, one in expected.items()} | changed
    flags = {**flags_of(name), **given}
    ours = config_of(reading, **flags)
    aim = RunConfig(**{**PLAN_DEFAULTS, **reading.values, **flags, **theirs})
    return {key: (aim.value(key), ours.value(key)) for key in theirs if aim.value(key) != ours.value(key)}
