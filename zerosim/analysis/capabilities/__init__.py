"""Every capability's part in the closed forms.

The order is that of operations in tables, and of what stands in place of what: a later one replaces what earlier ones
send. Words go the other way, from the outermost axis of a mesh inwards.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.analysis.capabilities import (
    compression,
    context,
    delayed,
    experts,
    fp8,
    hybrid,
    in_backward,
    mtp,
    offload,
    paging,
    pipeline,
    recompute,
    saving,
    second,
    tensor,
    tuning,
    zero,
    zeropp,
)
from zerosim.analysis.capability import Capability
from zerosim.config import RunConfig

CAPABILITIES: tuple[Capability, ...] = (
    zero.CAPABILITY,
    tuning.CAPABILITY,
    offload.CAPABILITY,
    delayed.CAPABILITY,
    in_backward.CAPABILITY,
    paging.CAPABILITY,
    compression.CAPABILITY,
    zeropp.CAPABILITY,
    hybrid.CAPABILITY,
    tensor.CAPABILITY,
    context.CAPABILITY,
    experts.CAPABILITY,
    fp8.CAPABILITY,
    second.CAPABILITY,
    mtp.CAPABILITY,
    recompute.CAPABILITY,
    pipeline.CAPABILITY,
    saving.CAPABILITY,
)


def notes_of(config: RunConfig, section: str) -> Iterator[str]:
    """Yield every capability's sentences for a section of a page."""
    for capability in reversed(CAPABILITIES):
        if note := capability.notes.get(section):
            yield from note(config)


def note_of(config: RunConfig, section: str) -> str:
    """Return these sentences as one text."""
    return " ".join(notes_of(config, section))
