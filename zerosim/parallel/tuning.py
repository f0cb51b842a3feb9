"""Buffers that PyTorch holds longer than their ops: autocast's casts, inputs of 4-bit maps, keys and values."""

from __future__ import annotations

from dataclasses import replace

from zerosim.config import RunConfig
from zerosim.config.parts.parallel import gathers_params
from zerosim.functional.lora import Casts
from zerosim.parallel.pieces import Pieces, Place
from zerosim.placement.dimension_zero import RowSlices
from zerosim.placement.partition import EvenSlices
from zerosim.placement.rows import Rows


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add what holds them. They outlive a block's forward or backward, so no block's record is repeated."""
    tuning = config.tuning
    caches = tuning.autocast is not None and not tuning.fused_lora
    caches = caches and not gathers_params(config.parallel)  # FSDP's gathered weights are views, no leaves
    if not caches and not tuning.bnb_saves_input and not config.memory.return_kv:
        return made
    return made._replace(casts=Casts(caches), repeats=False)


def cut_between(rows: Rows, row: int) -> Rows:
    """Return the rows of a buffer of one tensor that is cut between rows of so many elements, where slices are even."""
    return {
        state: replace(one, partition=RowSlices(row)) if isinstance(one.partition, EvenSlices) else one
        for state, one in rows.items()
    }
