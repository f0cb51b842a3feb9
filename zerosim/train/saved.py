"""What the save of a plan took, by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zerosim.ledger.saving import SaveCounts


class Saved(NamedTuple):
    """A save after a planned step, beside the step's own figures.

    how          as --save-as has it
    counts       by rank. A rank that did not run has the counts of one that writes as many numbers. Its largest run,
                 which a sharded save holds on the host, may be another
    peaks        by rank, the device's highest live bytes during the save; 0 where it allocates nothing there
    stands_for   by rank, the rank that ran for it
    """

    how: str
    counts: Sequence[SaveCounts]
    peaks: Sequence[int]
    stands_for: Sequence[int]

    @property
    def device_peak(self) -> int:
        """The fullest device during the save."""
        return max(self.peaks)
