"""The delayed parameter update of ZeRO-Offload (arXiv 2101.06840, section 5.2), from step N on.

    step          its gradients are of the weights after     the CPU's work beside its forward and backward
    1 .. N - 1    all earlier steps                          none: it updates after backward
    N             all earlier steps                          none; the gradients wait
    t > N         steps 1 .. t - 2                           the update with the gradients of t - 1

So a step's weights miss one update. When its backward ends, the new parameters replace the old ones, and the norm of
its own gradients is decided: loss scale, clipping and learning rate are those of the step that made the gradients. A
skipped step drops its gradients, and nothing waits then. After the last step, the waiting gradients are applied.

If the local shard of the parameters is on the device, the new one waits on the host, and is copied when backward has
left the buffer. If it is elsewhere, the new one waits beside it, and then replaces it. The host holds gradients of two
steps, and new parameters beside the old ones: 2 Psi/N bytes more of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from zerosim.config import RunConfig
from zerosim.device.away import Away
from zerosim.device.device import Buffer, Kind
from zerosim.device.events import CpuEvent, Wait
from zerosim.parallel.offload import OffloadedStep
from zerosim.parallel.pieces import Pieces, Place
from zerosim.parallel.schedule import Use
from zerosim.parallel.shards import Parameters
from zerosim.placement.memories import DEVICE, HOST
from zerosim.tensor.flat import Flat


class Delayed(OffloadedStep):
    """From step `first` on, the CPU applies a step's gradients during the next step."""

    def __init__(self, first: int, parameters: Parameters, place: str) -> None:
        super().__init__(place)
        self.first, self.parameters = first, parameters
        self._steps = 0  # that were decided
        self._last_slot = 0  # of the step's microbatches
        self._scale: float | None = None  # the factor for the waiting gradients
        self._flats: Sequence[Flat] = ()
        self._grads: list[Buffer | None] = []  # by flat; they live until the CPU has stepped
        self._new: dict[str, tuple[Away, int]] = {}  # local shards of new parameters, and the ends of their updates

    def hold(self, flats: Sequence[Flat], scale: float | None) -> float | None:
        self._steps += 1
        if self._steps < self.first:
            return scale
        if scale is not None:
            self._scale, self._flats, self._grads = scale, flats, [flat.grad_shard for flat in flats]
        return None

    def begin(self, uses: Sequence[Use]) -> tuple[Sequence[Flat], float] | None:
        if self._scale is None:
            return None
        for flat, grad in zip(self._flats, self._grads, strict=True):
            flat.grad_shard = grad
        self._last_slot = max((use.action.slot for use in uses), default=0)
        return self._flats[::-1], self._scale  # in the order in which backward will free the buffers

    def waiting(self, flat: Flat) -> Buffer | None:
        held = zip(self._flats, self._grads, strict=True) if self._scale is not None else ()
        return next((grad for one, grad in held if one.name == flat.name), None)

    @property
    def held(self) -> tuple[int, float | None]:
        """The steps that were decided, and the factor of the gradients that wait; None: none wait."""
        return self._steps, self._scale

    def resume(self, steps: int, scale: float | None, flats: Sequence[Flat], grads: Sequence[Buffer | None]) -> None:
        """Go on after so many decided steps, the last of which left these gradients for the next one's update."""
        self._steps, self._scale, self._flats, self._grads = steps, scale, flats, list(grads)

    def store(self, flat: Flat) -> None:
        if self._scale is None:  # this step's own update
            super().store(flat)
            return
        device, shard = flat.device, flat.shard()
        memory = HOST if shard.memory == DEVICE else shard.memory
        values = device.alloc(shard.shape, shard.dtype, Kind.PARAM, padding=flat.own_padding, memory=memory)
        self.round_into(values, flat)
        self._new[flat.name] = Away(values), device.next_id()
        device.recorder.add(CpuEvent(device.where, self._new[flat.name][1]))

    def left(self, flat: Flat) -> None:
        """Bring a flat's new parameters after the last of its gradients."""
        if flat.name in self._new and flat.device.where.slot == self._last_slot:
            self._bring(flat)

    def _bring(self, flat: Flat) -> Away:
        """Copy new parameters to the device after the CPU's update, if the shard is there and they are not in
        flight."""
        (new, stepped), shard, device = self._new[flat.name], flat.shard(), flat.device
        if shard.memory == DEVICE != new.memory:
            device.recorder.add(Wait(device.where, stepped, f"{HOST} to {DEVICE}"))
            new.launch(shard)
        return new

    def renew(self, flats: Sequence[Flat], publish: Callable[[Flat], None]) -> None:
        for flat in self._flats:
            if flat.name in self._new:
                with flat.device.scope(unit=flat.spec.module):
                    flat.param_shard = self._bring(flat).take()
                    del self._new[flat.name]
                    self.parameters.drop(flat)
                    publish(flat)
        self._scale, self._flats, self._grads = None, (), []


def add(made: Pieces, config: RunConfig, place: Place) -> Pieces:
    """Add the wait of a step's gradients for the next step."""
    if not config.grads.late:
        return made
    return made._replace(shards=partial(made.shards, make_step=partial(Delayed, config.grads.late)))
