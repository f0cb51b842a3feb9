"""Values for the letters of a run's closed forms (`formulas/letters.py`): those of every run, and each capability's.

The values describe the ranks of one pipeline stage.
"""

from __future__ import annotations

from zerosim.analysis.capabilities import CAPABILITIES
from zerosim.analysis.capability import Asked
from zerosim.analysis.shares import Placed, Share, share_of
from zerosim.analysis.weights import of_weights, place_of, sizes


def letters_of(
    placed: Placed, stage: int = 0, *, padded: bool = False, step: int = 0, share: Share | None = None
) -> dict[str, int]:
    """Return values for the letters on the ranks of a pipeline stage, in elements with padding or without. `step`: its
    number, if the first steps send differently."""
    asked = Asked(placed, share or share_of(placed, stage), padded, step)
    found = sizes(placed.config) | place_of(placed.config, asked.share)
    found |= of_weights(placed, asked.share, padded=padded)
    for capability in CAPABILITIES:
        found |= capability.letters(asked)
    return found
