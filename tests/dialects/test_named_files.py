"""DeepSpeed's part of another file: a section, a file that is named, and one that is not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zerosim.dialects import Context, Reading, read
from zerosim.errors import InputError

PART = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}


def of(tmp_path: Path, deepspeed: Any) -> Reading:
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"output_dir": "x", "bf16": True, "deepspeed": deepspeed}), encoding="utf-8")
    return read([str(path)], Context(given={"model": "llama3-8b", "ranks": 8}))


def test_a_section_is_read_as_its_own_file(tmp_path: Path) -> None:
    values = of(tmp_path, PART).values
    assert (values["stage"], values["recipe"], values["micro_batch"], values["precision"]) == (
        2,
        "hf-deepspeed",
        8,
        "bf16",
    )


def test_a_named_file_is_read_beside_the_other(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(PART), encoding="utf-8")
    assert of(tmp_path, "ds.json").values == of(tmp_path, PART).values


def test_a_file_that_is_not_here_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"deepspeed: zerosim: no such file here: ds.json; give it as a second file"):
        of(tmp_path, "ds.json").check()
