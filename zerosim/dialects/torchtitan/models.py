"""Models of torchtitan's tables, by family and flavor, and torchtitan's division of blocks among pipeline stages.

Read in torchtitan 0.2.2, models/*/__init__.py and distributed/pipeline_parallel.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zerosim.config import RunConfig

FLAVORS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "llama3": {"8B": "llama3-8b", "70B": "llama3-70b", "405B": "llama3.1-405b"},
        "qwen3": {
            "0.6B": "qwen3-0.6b",
            "1.7B": "qwen3-1.7b",
            "4B": "qwen3-4b",
            "8B": "qwen3-8b",
            "14B": "qwen3-14b",
            "32B": "qwen3-32b",
            "30B-A3B": "qwen3-30b-a3b",
            "235B-A22B": "qwen3-235b-a22b",
        },
        "deepseek_v3": {"16B": "deepseek-v2-lite", "236B": "deepseek-v2", "671B": "deepseek-v3"},
        "llama4": {"17bx16e": "llama4-scout", "17bx128e": "llama4-maverick"},
        "gpt_oss": {"20b": "gpt-oss-20b", "120b": "gpt-oss-120b"},
    }
)
"""By torchtitan's family and flavor, the preset of these sizes."""
MASKED = ("_flex", "_varlen", "_irope")
"""Ends of flavors with the same sizes, whose attention stays within documents."""
DEBUG = MappingProxyType(
    {"model": "llama", "layers": 6, "hidden": 256, "heads": 16, "kv_heads": 16, "ffn": 768, "vocab": 2048}
)
"""llama3's debugmodel."""
FLEX = ("deepseek_v3", "gpt_oss")
"""Families whose attention is PyTorch's FlexAttention; torchtitan has no context parallelism for it there."""
BALANCED = ("deepseek_v3", "llama4", "gpt_oss")
"""Families whose optimizer moves the router's biases."""
UNPIPED = ("qwen3", "gpt_oss")
"""Families without a pipeline."""


def sizes_of(family: str, flavor: str) -> Mapping[str, Any]:
    """Return options that say the sizes of this flavor; none for an unknown one."""
    if family == "llama3" and flavor.startswith("debugmodel"):
        return DEBUG
    for end in ("", *MASKED):
        plain = flavor.removesuffix(end) if flavor.endswith(end) else ""
        if plain in FLAVORS.get(family, ()):
            return {"model": FLAVORS[family][plain]}
    return {}


def flavor_of(config: RunConfig) -> tuple[str, str] | None:
    """Return family and flavor with a configuration's sizes; None if torchtitan has none."""
    for family, flavors in FLAVORS.items():
        for flavor, name in flavors.items():
            if name == config.value("model"):
                plain = RunConfig(model=name, ranks=1, seq=config.value("seq"))
                return (family, flavor) if plain.model == config.model else None
    debug = RunConfig(**DEBUG, rope_base=5e5, ranks=1, seq=config.value("seq"))
    return ("llama3", "debugmodel") if debug.model == config.model else None


def divided(chunks: int, layers: int, first: int, last: int) -> list[int]:
    """Return the blocks of each chunk, where table and head count as `first` and `last` blocks. Raises: ValueError as
    torchtitan does."""
    whole = layers + first + last
    if chunks > whole:
        raise ValueError(f"Number of stages ({chunks}) cannot be greater than effective layers ({whole})")
    each, more = divmod(whole, chunks)
    for name, weight in (("input_weight", first), ("output_weight", last)):
        if weight > each:
            raise ValueError(f"{name} ({weight}) exceeds minimum layers per stage ({each})")
    counts = [each + (index < more) for index in range(chunks)]
    counts[0] -= first
    counts[-1] -= last
    return counts
