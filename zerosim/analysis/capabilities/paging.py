"""Paged optimizer states. Bytes over both memories have the forms of states that are not paged. Which bytes lie where,
and what a step copies, depends on the device's limit and every allocation before, so these have none."""

from __future__ import annotations

from zerosim.analysis.capability import Capability, when
from zerosim.config import RunConfig
from zerosim.config.parts.paging import moves_pages


def is_on(config: RunConfig) -> bool:
    """Return whether states are paged."""
    return config.memory.paged_states


PAGED = (
    "States of 100,000 elements or more are paged. A full device moves the least recently used to host memory; the "
    "optimizer's step brings each flat buffer's states back."
)
CAPABILITY = Capability(
    notes={
        "model_states": lambda c: when(is_on(c), PAGED),
        "moved": lambda c: when(moves_pages(c.memory), "paged states"),
        "assumed": lambda c: when(is_on(c), "paged states"),
    },
    measured=lambda config: not is_on(config),
)
