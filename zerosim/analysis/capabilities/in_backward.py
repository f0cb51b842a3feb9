"""The optimizer in backward: no gradient outlives it."""

from __future__ import annotations

from zerosim.analysis.capability import Capability, Kept, when
from zerosim.config import RunConfig

FREED = (
    "The optimizer updates each flat buffer inside backward and frees its gradient (arXiv 2306.09782). A rank holds "
    "gradients of one buffer, or of one bucket. Nothing is clipped, skipped or accumulated."
)


def frees(config: RunConfig) -> bool:
    """Return whether each gradient is freed inside backward."""
    return config.grads.in_backward


def _kept(config: RunConfig, kept: Kept) -> Kept:
    return kept._replace(grads=not frees(config))


CAPABILITY = Capability(
    kept=_kept,
    notes={"model_states": lambda c: when(frees(c), FREED)},
    measured=lambda config: not frees(config),
)
