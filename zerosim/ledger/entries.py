"""Entries of a rank's step for the clock: computing, launching, waiting, copying."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

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

    def then(self, other: Busy) -> Busy:
        """Return both, one after the other: the second may begin where this one ends."""
        return Busy(
            self.scope,
            self.name,
            self.seconds + other.seconds,
            self.flops + other.flops,
            self.model_flops + other.model_flops,
            self.kernels + other.kernels,
            self.launch + other.launch,
            max(self.lag + other.seconds, self.launch + other.lag),
            self.place,
        )


class Live(NamedTuple):
    """The number of live bytes from here on."""

    scope: Scope
    nbytes: int


Entry = Busy | Launch | Wait | Copy | CpuEvent | Live


class Entries(Protocol):
    """A rank's entries of a step, in order."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Entry]: ...
