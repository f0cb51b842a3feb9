"""Frequencies of scaled rotary positions, against transformers'."""

from __future__ import annotations

import math
from typing import Any

import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from zerosim.functional.rope_scaling import inverse_frequencies

LONG = {"original_max_position_embeddings": 4096}
PAIRS = [1.0 + i / 7 for i in range(48)], [2.0 + i for i in range(48)]
CASES: list[tuple[str, dict[str, Any], float, int]] = [
    ("linear", {"factor": 8.0}, 1e4, 128),
    ("linear", {"factor": 3.0}, 1e6, 96),
    ("dynamic", {"factor": 2.0}, 1e4, 128),
    ("dynamic", {"factor": 4.0}, 1e6, 64),
    ("yarn", {"factor": 4.0, **LONG}, 1e6, 128),
    ("yarn", {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8, **LONG}, 1e4, 64),
    ("yarn", {"factor": 32.0, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0, **LONG}, 150000.0, 64),
    ("yarn", {"factor": 4.0, "attention_factor": 1.25, **LONG}, 1e4, 80),
    ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG}, 5e5, 128),
    ("llama3", {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG}, 5e5, 64),
    ("longrope", {"short_factor": PAIRS[0], "long_factor": PAIRS[1], **LONG}, 1e4, 96),
    ("longrope", {"short_factor": PAIRS[0], "long_factor": PAIRS[1], "attention_factor": 1.3, **LONG}, 1e4, 96),
]


@pytest.mark.parametrize(("kind", "parameters", "base", "columns"), CASES)
@pytest.mark.parametrize("seq", [512, 4097, 200_000])
def test_frequencies_are_transformers(
    kind: str, parameters: dict[str, Any], base: float, columns: int, seq: int
) -> None:
    positions = 131_072
    config = LlamaConfig(
        hidden_size=4 * columns, num_attention_heads=4, max_position_embeddings=positions,
        rope_parameters={"rope_type": kind, "rope_theta": base, **parameters},
    )  # fmt: skip
    theirs, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=seq)
    ours, own = inverse_frequencies(kind, parameters, base, columns, positions, seq)
    assert own == pytest.approx(factor, rel=1e-12)
    assert len(ours) == len(theirs)
    worst = max(abs(one / float(other) - 1) for one, other in zip(ours, theirs, strict=True))
    assert worst <= 2.0**-23, worst  # one last place of fp32: torch's power is off by that in one case of a thousand
    assert all(math.isfinite(one) for one in ours)
