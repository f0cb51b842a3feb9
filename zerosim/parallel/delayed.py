"""The delayed parameter update of ZeRO-Offload (arXiv 2101.06840, section 5.2), from step N on.

    step          its gradients are of the weights after     the CPU's work beside its forward and backward
    1 .. N - 1    all earlier steps                          none: it updates after backward
    N             all earlier steps                          none; the gradients wait
    t > N         steps 1 .. t - 2                           the update with the gradients of t - 1

So a step's weights miss one update. When its backward ends, the new parameters replace the old ones, and the norm of
its own gradients is decided: loss scale, clipping and learning rate are those of the step that made the gradients. A
skipped step drops its gradients, and nothing waits then. After the last step, the waiting gradients are applied.

The host holds gradients of two steps, and new parameters beside the old ones: 2 Psi/N bytes more of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zerosim.comm.groups import Groups
from zerosim.config.parts.grads import GradMemory
from zerosim.device.device import Buffer, Phase
from zerosim.optim.updater import Updater
from zerosim.parallel import update
from zerosim.parallel.schedule import Use
from zerosim.tensor.flat import Flat
from zerosim.tensor.late import LateParams


class Delayed:
    """One step's gradients, which the CPU applies during the next step."""

    def __init__(self, updater: Updater, flats: Sequence[Flat], memory: GradMemory, groups: Groups) -> None:
        self.updater, self.flats, self.memory, self.groups = updater, flats, memory, groups
        self._scale: float | None = None  # the factor for the waiting gradients
        self._grads: list[Buffer | None] = []  # by flat; they live until the CPU has stepped

    def hold(self, scale: float | None) -> float | None:
        """Hold back the gradients, to be multiplied by `scale`. Return the factor for this step's own update: None or,
        if its update is not delayed, `scale`."""
        is_late = 0 < self.memory.late <= len(self.updater.control.reports)
        if is_late and scale is not None:
            self._scale, self._grads = scale, [flat.grad_shard for flat in self.flats]
        return None if is_late else scale

    def launch(self, uses: Sequence[Use] = ()) -> None:
        """Start the CPU's update with the waiting gradients, in the order in which backward will free the buffers."""
        if self._scale is None or not self.flats:
            return
        for flat, grad in zip(self.flats, self._grads, strict=True):
            flat.grad_shard = grad
            if flat.outgoing is not None:
                flat.outgoing.last_slot = max((use.action.slot for use in uses), default=0)
        with self.flats[0].device.phase(Phase.OPTIMIZER):
            flats = self.flats[::-1]
            update.step(self.updater, flats, self._scale, self.memory, self.groups, lambda flat: None, _store)
        self._scale = None

    def replace_params(self, publish: Callable[[Flat], None]) -> None:
        """Replace the old parameters by the new ones, if there are any. Called when backward ends."""
        for flat in self.flats if self._grads else ():
            if flat.outgoing is not None and (late := flat.outgoing.late.pop(flat.name, None)) is not None:
                with flat.device.scope(unit=flat.spec.module):
                    late.replace()
                    del late
                    publish(flat)
        self._grads = []

    def finish(self, publish: Callable[[Flat], None], step: int) -> None:
        """Apply the waiting gradients after the last step, recorded as `step`."""
        if self._scale is not None and self.flats:
            with self.flats[0].device.scope(step=step, phase=Phase.OPTIMIZER):
                self.launch()
                self.replace_params(publish)


def _store(flat: Flat) -> None:
    assert flat.outgoing is not None
    flat.outgoing.late[flat.name] = LateParams(flat)
