"""Large optimizer states in pages, as in bitsandbytes' paged optimizers. A step brings one flat buffer's states to the
device, and updates there.

Source: bitsandbytes 0.50, optim/optimizer.py. There a tensor's states are paged, here the states of a local shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerosim.device.device import Buffer
from zerosim.device.paging import Pages
from zerosim.optim.optimizer import Add, alone
from zerosim.optim.states import StateArray
from zerosim.optim.updater import Updater
from zerosim.tensor.flat import Flat

PAGED_NUMEL = 100_000
"""The fewest elements of a paged state (get_state_buffer)."""


def is_paged(state: StateArray) -> bool:
    """Return whether a state is paged: masters and the scales of 8-bit states never are."""
    return state.numel >= PAGED_NUMEL and state.name != "master" and state.follows != "blocks"


class PagedUpdater(Updater):
    """Updates with states that may have left the device."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.pages = Pages()

    def update(self, flat: Flat, grad_scale: float, add: Add = alone) -> None:
        self.pages.use(flat.states.values())
        super().update(flat, grad_scale, add)
        self.pages.use(())

    def estimate(self, flat: Flat, grad_scale: float) -> None:
        self.pages.use(flat.states.values())
        super().estimate(flat, grad_scale)
        self.pages.use(())

    def _zeroed(self, flat: Flat, arrays: Sequence[StateArray]) -> dict[str, Buffer]:
        arrays = [one._replace(paged=is_paged(one)) for one in arrays]
        states = super()._zeroed(flat, arrays)
        for one in arrays:
            if one.paged:
                self.pages.add(states[one.name], one.padding)
        return states
