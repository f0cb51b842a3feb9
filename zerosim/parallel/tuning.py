"""Adapters under autocast: who holds the casts of their weights."""

from __future__ import annotations

from zerosim.config import RunConfig
from zerosim.config.parts.parallel import gathers_params
from zerosim.functional.lora import Casts
from zerosim.parallel.pieces import Pieces, Place


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add autocast's cache of casts. They outlive a recomputed block's forward, so no block's record is repeated."""
    tuning = config.tuning
    if tuning.autocast is None or tuning.fused_lora or gathers_params(config.parallel):  # FSDP's views are no leaves
        return made
    return made._replace(casts=Casts(), repeats=made.repeats and made.policy.recompute == "none")
