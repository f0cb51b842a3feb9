"""The configuration files of tests/config/files, with changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zerosim.config.huggingface.read import model_of
from zerosim.config.presets.models import ModelPreset

FILES = Path(__file__).parent / "config" / "files"


def file(name: str, **changes: Any) -> dict[str, Any]:
    """The keys of a file, some changed; a change to `...` drops the key."""
    values = {**json.loads((FILES / f"{name}.json").read_text("utf-8")), **changes}
    return {key: value for key, value in values.items() if value is not ...}


def model(name: str, **changes: Any) -> ModelPreset:
    return model_of("config.json", file(name, **changes))
