"""Two saved steps compared: every number of every state, whatever mesh wrote each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from zerosim.state.checkpoint import Checkpoint
from zerosim.state.runs import Cuts


class Difference(NamedTuple):
    """A state of a weight that is not the same: why, in words."""

    weight: str
    state: str
    why: str


def differences(one: Checkpoint, other: Checkpoint) -> Iterator[Difference]:
    """Yield what differs, weight by weight. Numbers that are each rank's own are compared as their mean over ranks."""
    for weight, state in dict.fromkeys([*one.names, *other.names]):
        lacking = next((there for there in (one, other) if (weight, state) not in there.names), None)
        if lacking is not None:
            yield Difference(weight, state, f"is not in {lacking.folder}")
        elif why := _unlike(one, other, weight, state):
            yield Difference(weight, state, why)


def _unlike(one: Checkpoint, other: Checkpoint, weight: str, state: str) -> str:
    """Return in words how a state differs; '' if it does not."""
    ours, theirs = (list(_parts(there, weight, state)) for there in (one, other))
    if [place for place, _ in ours] != [place for place, _ in theirs]:
        return "belongs to pieces of another mesh"
    for (_, mine), (_, its) in zip(ours, theirs, strict=True):
        if mine.shape != its.shape:
            return f"has shape {mine.shape} and {its.shape}"
        if not np.array_equal(mine, its, equal_nan=mine.dtype.kind == "f"):
            unlike = np.flatnonzero(~((mine == its) | ((mine != mine) & (its != its))).reshape(-1))
            most = np.max(np.abs(mine.astype(np.float64) - its.astype(np.float64)))
            return f"{unlike.size:,} of {mine.size:,} numbers differ, by at most {most:.3g}; the first is {unlike[0]:,}"
    return ""


def _parts(there: Checkpoint, weight: str, state: str) -> Iterator[tuple[Cuts, Any]]:
    follows = there.follows(weight, state)
    if follows == "elements":
        yield (), there.whole(weight, state)
        return
    for cuts, stop in there.pieces(weight, state):
        if follows == "rank":
            yield cuts, there.means(weight, state, cuts, 0, stop)
        else:
            yield cuts, there.alike(weight, state, cuts, stop)
