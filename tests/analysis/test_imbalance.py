"""The fullest expert that still fits."""

from __future__ import annotations

from typing import Any

import pytest

from zerosim.analysis.experts_imbalance import STEPS, fullest_that_fits, words_of
from zerosim.config import RunConfig
from zerosim.placement.spread import fullest
from zerosim.train.plan import plan

SIZES: dict[str, Any] = dict(model="llama", layers=2, hidden=64, heads=4, ffn=96, experts=16, top_k=2, seq=64)
EIGHT = RunConfig(**SIZES, ranks=4, ep=4, stage=3)
"""Eight times the mean is all tokens."""


def peak(config: RunConfig) -> int:
    return max(memory.peak.total_bytes for memory in plan(config).memory)


@pytest.mark.parametrize("at", [0, 2, -1])
def test_the_largest_step_that_fits_is_found(at: int) -> None:
    tried = [*(one for one in STEPS if one < 8), 8.0]
    limit = peak(EIGHT.replace(routing=f"fullest:{tried[at]:g}"))
    found = fullest_that_fits(EIGHT, lambda config: peak(config) <= limit)
    assert found == (tried[at], at == -1)
    assert f"{tried[at]:g} times" in words_of(found) or found == (8.0, True)


def test_peaks_grow_with_the_fullest_expert() -> None:
    peaks = [peak(EIGHT.replace(routing=f"fullest:{times}")) for times in (1, 2, 4, 8)]
    assert peaks == sorted(peaks)
    assert peaks[0] == peak(EIGHT) < peaks[-1]
    assert fullest(16, 4).counts(64, 2, 16)[0] == 4 * 64 * 2 // 16


def test_nothing_is_said_where_tokens_go_nowhere() -> None:
    assert fullest_that_fits(EIGHT.replace(ep=1), lambda config: True) is None
    assert fullest_that_fits(EIGHT.replace(routing="zipf:1"), lambda config: True) is None
    assert words_of(None) == ""
    assert words_of((1.0, False)).startswith("Tokens must spread evenly")
