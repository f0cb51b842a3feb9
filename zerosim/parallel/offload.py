"""Offloaded model states (ZeRO-Offload, ZeRO-Infinity): which memory has which state. How they move is in
`tensor/offloaded.py`."""

from __future__ import annotations

from functools import partial

from zerosim.config import RunConfig
from zerosim.parallel.pieces import Pieces, Place
from zerosim.placement.memories import NVME


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add the memories of local slices. States on NVMe are stepped in tiles of one flat or more."""
    on_nvme = config.offload.memory_of("optimizer") == NVME
    rows = partial(made.rows, memories=config.offload.by_state)
    return made._replace(rows=rows, sub_group=made.sub_group or int(on_nvme))
