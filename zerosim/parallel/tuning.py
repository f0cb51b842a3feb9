"""Buffers that PyTorch holds longer than their ops: autocast's casts, inputs of 4-bit maps, keys, values, outputs."""

from __future__ import annotations

from dataclasses import replace

from zerosim.config import RunConfig
from zerosim.config.parts.parallel import gathers_params
from zerosim.config.parts.tuning import NOT_CUT
from zerosim.functional.lora import Casts
from zerosim.parallel.pieces import Pieces, Place
from zerosim.placement.dimension_zero import RowSlices
from zerosim.placement.partition import EvenSlices
from zerosim.placement.rows import Rows


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add what holds them. They outlive a block's forward or backward, so no block's record is repeated."""
    tuning = config.tuning
    caches = tuning.autocast is not None and not tuning.fused_lora
    # Leaves are cached, as FSDP2's gathered weights are. FSDP1's are views.
    caches = caches and (not gathers_params(config.parallel) or config.parallel.recipe == "fsdp2")
    holds = tuning.bnb_saves_input or config.memory.use_cache
    if not caches and not holds and not config.holds_rows:
        return made
    casts = Casts(caches, config.memory.returns_outputs, holds_rows=config.holds_rows)
    return made._replace(casts=casts, repeats=made.repeats and not (caches or holds))


def cut_between(rows: Rows, row: int) -> Rows:
    """Return the rows of a buffer of one tensor that is cut between rows of so many elements, where slices are even; of
    one that every rank has whole if it is NOT_CUT."""
    if row == NOT_CUT:
        return {state: replace(one, axes=()) for state, one in rows.items()}
    return {
        state: replace(one, partition=RowSlices(row)) if isinstance(one.partition, EvenSlices) else one
        for state, one in rows.items()
    }
