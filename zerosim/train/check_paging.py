"""The rule for a run whose optimizer states are all too small to be paged: sizes are known once its model is."""

from __future__ import annotations

from collections.abc import Iterator

from zerosim.config import RunConfig
from zerosim.dtypes import fp32
from zerosim.errors import InputError, wrong
from zerosim.models.model import Model
from zerosim.optim.paging import PAGED_NUMEL, is_paged
from zerosim.train.build_strategy import layout_of
from zerosim.train.pieces import pieces_of


def rules(config: RunConfig, model: Model) -> Iterator[InputError]:
    """Yield paged states where no rank has one."""
    if not config.memory.paged_states:
        return
    layout, optimizer, largest = layout_of(config, model), pieces_of(config).optimizer(), (0, "")
    for rank in range(layout.mesh.world_size):
        for name in layout.stages[layout.mesh.index(rank, "pp")]:
            if not layout.is_trained(name):
                continue
            for array in optimizer.arrays(layout.flats[name], layout.own(rank, name), fp32):
                if is_paged(array):
                    return
                largest = max(largest, (array.numel, f"{array.name} of {name}"))
    yield wrong(
        "paged_states",
        f": only states of {PAGED_NUMEL:,} elements or more are paged, and the largest on a rank has {largest[0]:,} "
        f"({largest[1]}); choose fewer ranks or a larger model, or leave it out",
    )
