"""Paged optimizer states (bitsandbytes): who uses them, and what a plan may repeat. Which they are is in
`optim/paging.py`, how they move in `device/paging.py`."""

from __future__ import annotations

from zerosim.config import RunConfig
from zerosim.config.parts.paging import moves_pages
from zerosim.optim.paging import PagedUpdater
from zerosim.parallel.pieces import Pieces, Place


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add paged states. On a device with a limit no block repeats another one's record: a full device moves pages in
    the middle of any block."""
    if not config.memory.paged_states:
        return made
    return made._replace(updater=PagedUpdater, repeats=made.repeats and not moves_pages(config.memory))
