"""The optimizer in backward: each flat is updated when its gradient is reduced, and the gradient is freed.

A rank holds the gradients of one flat, or of one bucket. The norm of all gradients is never known, so nothing is
clipped, no step is skipped and no loss scale changes. New parameters are published when backward has ended, as by a
step after it.

Source: LOMO (arXiv 2306.09782, section 3.1); torchtune's optimizer_in_bwd; PyTorch's
register_post_accumulate_grad_hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from zerosim.config import RunConfig
from zerosim.config.parts.grads import GradMemory
from zerosim.device.device import Buffer, Phase
from zerosim.optim.updater import Updater
from zerosim.parallel import update
from zerosim.parallel.pieces import Pieces, Place
from zerosim.parallel.published import regather
from zerosim.parallel.schedule import Use
from zerosim.parallel.shards import Gradients, Shards, Step
from zerosim.tensor.flat import Flat, in_turn


class InBackward(Gradients, Step):
    """Reduced gradients that are used at once. `shards`: where the update finds and stores its states."""

    decides = False

    def __init__(self, updater: Updater, memory: GradMemory, place: Place, shards: Shards) -> None:
        assert place.groups is not None
        self.control = updater.control
        self.update = partial(update.step, updater, memory=memory, groups=place.groups, shards=shards)
        self._scale: float | None = None  # of this step's gradients

    def begin(self, uses: Sequence[Use]) -> tuple[Sequence[Flat], float] | None:
        self._scale = self.control.decide_unseen() if uses else None
        return None

    def keep(self, flat: Flat, grad: Buffer | None) -> None:
        super().keep(flat, grad)
        self._use(flat)

    def keep_in_place(self, flat: Flat, own: Buffer | None) -> None:
        super().keep_in_place(flat, own)
        self._use(flat)

    def _use(self, flat: Flat) -> None:
        assert self._scale is not None
        with flat.device.phase(Phase.OPTIMIZER):
            self.update([flat], self._scale, publish=lambda flat: None)

    def renew(self, flats: Sequence[Flat], publish: Callable[[Flat], None]) -> None:
        for flat in in_turn(flats) if self._scale is not None else ():
            if flat.spec.is_trained:
                publish(flat)
        if self._scale is not None:
            regather(flats, publish)


def shards_of(shards: Callable[[Updater], Shards], memory: GradMemory, place: Place, updater: Updater) -> Shards:
    """Return local shards whose gradients are used at once."""
    inner = shards(updater)
    one = InBackward(updater, memory, place, inner)
    return Shards(one, inner.parameters, one)


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add the update inside backward."""
    if not config.grads.in_backward:
        return made
    return made._replace(shards=partial(shards_of, made.shards, config.grads, place))
