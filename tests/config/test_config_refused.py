"""config.json files that are refused: one line with the file and the key, as it stands here, and exit code 2."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from config_files import FILES, file

from zerosim.cli.main import main
from zerosim.config import OPTIONS
from zerosim.config.huggingface.families import FAMILIES
from zerosim.config.huggingface.other_keys import NESTED, NOTED
from zerosim.config.huggingface.read import model_of
from zerosim.errors import InputError

FULL, SLIDING = "full_attention", "sliding_attention"
LISTS = file("phi-3-mini-128k")["rope_scaling"]
TEXT = file("gemma3-4b")["text_config"]

LONG: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3-0.6b", {"layer_types": [FULL] * 27}, "layer_types has 27 values: expected 28, one for each block"),
    (
        "qwen3-0.6b",
        {"layer_types": [FULL, "linear_attention"] * 14},
        'layer_types "linear_attention" is not modelled: expected full_attention or sliding_attention',
    ),
    (
        "qwen3-0.6b",
        {"layer_types": [FULL, SLIDING] * 14},
        "layer_types has sliding_attention, but there is no sliding_window",
    ),
    (
        "gemma2-27b",
        {"layer_types": [SLIDING] * 20 + [FULL] * 6 + [SLIDING] * 20},
        "layer_types: no model here has these windows; possible are a window in every block, in all from one on, "
        "and in all but each n-th",
    ),
    (
        "phi-3-mini-128k",
        {"rope_scaling": {**LISTS, "long_factor": [1.0] * 47}},
        "rope_scaling: long_factor 47 numbers: expected a list of 48, one for each pair of rotated columns",
    ),
    (
        "phi-3-mini-128k",
        {"rope_scaling": {**LISTS, "short_factor": [1.0] * 47 + ["1"]}},
        'rope_scaling: short_factor "1": expected a number more than 0',
    ),
    (
        "phi-3-mini-128k",
        {"rope_scaling": {**LISTS, "short_factor": [1.0] * 47 + [math.inf]}},
        "rope_scaling: short_factor Infinity: expected a number more than 0",
    ),
    (
        "phi-3-mini-128k",
        {"rope_scaling": {**LISTS, "long_factor": 2.0}},
        "rope_scaling: long_factor 2.0: expected a list of 48, one for each pair of rotated columns",
    ),
    (
        "gemma3-4b",
        {"text_config": {**TEXT, "rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 2.0}}}},
        "text_config: rope_parameters: sliding_attention: a scaling of the angles in blocks with a window is not "
        "modelled",
    ),
]


def refused() -> list[tuple[str, dict[str, Any], str]]:
    """A file, changes of its keys, and the message: those of refused.jsonl, a line each, and those with long lists.

    "<drop>" leaves out the key. A message that ends in "known are" goes on with all families.
    """
    rows = [json.loads(line) for line in (FILES / "refused.jsonl").read_text("utf-8").splitlines()]
    dropped = [({key: ... if one == "<drop>" else one for key, one in row[1].items()}, row) for row in rows]
    return [(row[0], changes, row[2]) for changes, row in dropped] + LONG


@pytest.mark.parametrize(("name", "changes", "message"), refused(), ids=[row[2][:50] for row in refused()])
def test_what_is_refused_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        model_of("config.json", file(name, **changes))
    families = ", ".join([*FAMILIES, *NESTED]) if message.endswith("known are ") else ""
    assert str(caught.value) == f"config.json: {message}{families}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "config.json is not JSON: "),
        (lambda text: text.replace("{", '{"vocab_size": 1,', 1), "config.json: 'vocab_size' appears twice; keep one"),
        (lambda text: text.replace("1e-06", "NaN"), "config.json: rms_norm_eps NaN: expected a number more than 0"),
        (lambda text: text.replace("qwen3", "minimax"), "is not modelled (it has experts); known are gpt2"),
    ],
    ids=["truncated", "twice", "nan", "experts"],
)
def test_a_broken_file_ends_in_one_line(
    change: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(change((FILES / "qwen3-8b.json").read_text("utf-8")), "utf-8")
    assert main(["plan", "--model", str(path)]) == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert "\n" not in said


def test_nothing_of_a_file_is_executed(tmp_path: Path) -> None:
    """auto_map names code in the same folder: it is named, and stays where it is."""
    (tmp_path / "configuration_phi3.py").write_text("raise SystemExit('executed')", "utf-8")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(file("phi-3-mini-4k")), "utf-8")
    preset = model_of(str(path), json.loads(path.read_text("utf-8")))
    assert preset.notes == ("auto_map: it names Python code, which is never run; the model_type decides",)


ODD: tuple[Any, ...] = (
    ..., None, True, False, 0, 1, -1, 2.5, "", "x", [], [1], [None], [[1]], {}, {"a": 1}, math.nan, math.inf, 10**40,
    "\ud800",
)  # fmt: skip
"""Values that no key expects; `...` leaves out the key."""


def inner(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every key, with the object that it is in."""
    for key, value in list(values.items()):
        yield values, key
        if isinstance(value, dict):
            yield from inner(value)


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", sorted(path.stem for path in FILES.glob("*.json")))
def test_any_value_is_read_or_refused_in_one_line(name: str) -> None:
    values, said = file(name), list[str]()
    for owner, key in list(inner(values)):
        there = owner.pop(key)
        for odd in ODD:
            if odd is not ...:
                owner[key] = odd
            try:
                model_of("config.json", values)
            except InputError as error:
                said.append(str(error))
        owner[key] = there
    assert len(said) > 20
    assert not any("\n" in line for line in said)


def test_notes_name_flags_that_exist() -> None:
    flags = {flag for one in OPTIONS.values() for flag in (f"--{one.flat.replace('_', '-')}", *one.also)}
    named = {flag for words in NOTED.values() for flag in re.findall(r"--[a-z][a-z-]*", words)}
    assert "--aux-loss" in named
    assert named <= flags
