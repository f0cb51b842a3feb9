"""Entries of a rank's step for the clock: computing, launching, waiting, copying."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeGuard

from zerosim.device.events import Copy, CpuEvent, Launch, Scope, Wait
from zerosim.placement.memories import DEVICE


class Busy(NamedTuple):
    """The device, or its host's CPU (`place`), computes for some seconds, in this number of `kernels`. `flops` are
    those of products; `model_flops` leave out recomputed products.

    launch  seconds of the host, to launch them
    lag     seconds from the host's first launch to the end of the kernels on a device that waits for nothing
            else
    """

    scope: Scope
    name: str
    seconds: float
    flops: int
    model_flops: int
    kernels: int = 1
    launch: float = 0.0
    lag: float = 0.0
    place: str = DEVICE

    def then(self, *others: Busy) -> Busy:
        """Return all, one after the other: each may begin where the one before it ends."""
        seconds, launch, lag = self.seconds, self.launch, self.lag
        for other in others:  # in order, as sums of seconds depend on it
            seconds, lag = seconds + other.seconds, max(lag + other.seconds, launch + other.lag)
            launch += other.launch
        flops = sum([other.flops for other in others], self.flops)
        model_flops = sum([other.model_flops for other in others], self.model_flops)
        kernels = sum([other.kernels for other in others], self.kernels)
        return Busy(self.scope, self.name, seconds, flops, model_flops, kernels, launch, lag, self.place)


class Live(NamedTuple):
    """The number of live bytes from here on."""

    scope: Scope
    nbytes: int


Entry = Busy | Launch | Wait | Copy | CpuEvent | Live


def goes_on(last: Entry | None, entry: Entry) -> TypeGuard[Busy]:
    """Return whether both are kernels in one scope and place: then they are one entry."""
    if not (isinstance(last, Busy) and isinstance(entry, Busy)):
        return False
    return (last.scope, last.place) == (entry.scope, entry.place)


class Entries(Protocol):
    """A rank's entries of a step, in order."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Entry]: ...
