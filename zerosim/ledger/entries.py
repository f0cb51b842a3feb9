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
        scope, name, seconds, flops, model_flops, kernels, launch, lag, place = self
        for _, _, more, its_flops, its_model_flops, its_kernels, its_launch, its_lag, _ in others:
            lag = max(lag + more, launch + its_lag)
            seconds += more  # in order, as sums of seconds depend on it
            launch += its_launch
            flops += its_flops
            model_flops += its_model_flops
            kernels += its_kernels
        return Busy(scope, name, seconds, flops, model_flops, kernels, launch, lag, place)


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
