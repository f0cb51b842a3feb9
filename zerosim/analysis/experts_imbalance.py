"""The imbalance of experts that still fits: how many times the mean the fullest of them may get."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable

from zerosim.config import RunConfig

STEPS = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
"""Times the mean that are tried."""


def fullest_that_fits(config: RunConfig, fits: Callable[[RunConfig], bool]) -> tuple[float, bool] | None:
    """Return how many times the mean of tokens one expert may get, the largest of STEPS that fits, and whether all
    tokens may choose it. None: experts are on every rank, or the plan says otherwise how tokens spread.

    One rank has it, and so more rows of activations. Memory grows with them, so the search halves its steps.
    """
    if config.experts.routing not in (None, "even") or config.mesh.ep == 1:
        return None
    most = config.model.all_on_one
    tried = [*(step for step in STEPS if step < most), most]
    found = bisect(tried, 0, key=lambda times: not fits(config.replace(routing=f"fullest:{times}")))
    return (tried[found - 1] if found else 1.0), found == len(tried)


def words_of(found: tuple[float, bool] | None) -> str:
    """Return a sentence about it, '' for None."""
    if found is None:
        return ""
    times, is_all = found
    if is_all:
        return "Even if all tokens choose one expert it fits."
    if times == 1.0:
        return f"Tokens must spread evenly: with {STEPS[0]:g} times the mean for one expert it does not fit."
    return f"It fits while the fullest expert gets at most {times:g} times the mean."
