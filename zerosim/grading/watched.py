"""What a run under the grader's eyes records more than others: gradients that reach the optimizer; and its bounds.

Owns how much a rank may do before it is ended, and what is kept of each update.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from zerosim.device.device import Switch
from zerosim.device.events import Event, Free, Reader, Recorder
from zerosim.errors import InputError
from zerosim.optim.updater import Updater
from zerosim.tensor.flat import Flat

EVENTS_PER_STEP = 10_000
"""How much one rank may do; the runs that are graded need about a tenth of it at most."""


class Update(NamedTuple):
    """A gradient as it reached the optimizer on one rank, on the host, and what it was multiplied by.

    `start` and `size` are the own slice's; `grad` should have `size` elements. `number` counts the rank's events.
    """

    step: int
    unit: str
    start: int
    size: int
    grad: Any
    scale: float
    number: int


class Over(BaseException):
    """Ends a rank of a run that has ended. No Exception: a strategy's own `except Exception` must not stop it."""


class Endless(Over):
    """A rank did more than any solution needs."""


class BoundedRecorder(Recorder):
    """Keeps all, up to a limit; and ends where the run did: what threads free while they unwind is no part of it."""

    def __init__(self, readers: tuple[Reader, ...], switch: Switch, limit: int) -> None:
        super().__init__(readers, keep=True)
        self._switch = switch
        self._limit = limit
        self._left = limit
        self.is_over = False

    @property
    def count(self) -> int:
        return len(self.history) + len(self.events)

    @property
    def enabled(self) -> bool:
        return True

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if not value:
            raise InputError("the record is what is graded: it cannot be switched off")

    @property
    def is_whole(self) -> bool:
        """Whether all that was added is there."""
        return self.count == self._limit - self._left

    def add(self, event: Event) -> None:
        is_free = isinstance(event, Free)  # from a destructor, which must not raise
        if self._switch.aborted:
            if is_free:
                return
            raise Over
        super().add(event)
        self._left -= 1
        if self._left < 0 and not is_free:
            self.is_over = True
            raise Endless(f"{self.count:,} events, and it does not look as if this would end")


class WatchedUpdater(Updater):
    """The run's updater, which keeps what it is given."""

    def __init__(self, inner: Updater, recorder: BoundedRecorder, seen: list[Update]) -> None:
        vars(self).update(vars(inner))  # the run's own, whatever it holds: its result reads the same reports
        self._recorder = recorder
        self._seen = seen

    def update(self, flat: Flat, grad_scale: float) -> None:
        own, grad = flat.own, flat.grad_shard
        numel = 0 if grad is None else grad.numel
        if numel < own.size:
            has = f"{numel:,} elements of gradient" if numel else "no gradient"
            raise InputError(
                f"{flat.name} reaches its update with {has}, its slice has {own.size:,}: "
                "set flat.grad_shard (or call add_grad_shard) with the reduced slice before the step"
            )
        if grad is not None:
            values = np.array(flat.device.backend.to_host(grad.array))
            step = flat.device.where.step
            self._seen.append(Update(step, flat.name, own.start, own.size, values, grad_scale, self._recorder.count))
        super().update(flat, grad_scale)
