"""The configuration files of tests/config/files, with changes."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
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


NORM_PLACES = MappingProxyType(
    {
        "qwen3": "qwen3-8b",  # before each branch
        "gemma2": "gemma2-27b",  # around
        "olmo2": "olmo2-7b",  # after
        "gpt_neox": "gpt-neox-20b",  # before both, side by side
        "cohere": "command-r-35b",  # one for both, side by side
    }
)
"""A family of each place of norms, and its published file."""


def small(family: str, folder: Path) -> str:
    """Write a family's published file with small sizes into a folder, and return the folder's name."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    more = {"vocab_size": 256, "max_position_embeddings": 64}
    own = {
        "qwen3": {"num_key_value_heads": 1, "head_dim": 12},
        "gemma2": {"num_key_value_heads": 1, "head_dim": 12, "sliding_window": 4, "query_pre_attn_scalar": 12},
        "olmo2": {"num_key_value_heads": 2},
        "cohere": {"num_key_value_heads": 2},
    }
    values = file(NORM_PLACES[family], **sizes, **more, **own.get(family, {}))
    (folder / "config.json").write_text(json.dumps(values), "utf-8")
    return str(folder)
