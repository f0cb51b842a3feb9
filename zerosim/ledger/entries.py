"""Entries of a rank's step: what the clock needs of its record. It computes, launches, waits, copies."""

from __future__ import annotations

from typing import NamedTuple

from zerosim.device.events import Copy, Launch, Scope, Wait


class Busy(NamedTuple):
    """The device computes for so many seconds, in so many `kernels`. `flops` are those of products; `forward_flops`
    those of a forward.

    launch  seconds of the host, to launch them
    lag     seconds from the moment when the host begins to launch them to that when a device that waits for nothing
            else has run them
    """

    scope: Scope
    name: str
    seconds: float
    flops: int
    forward_flops: int
    kernels: int = 1
    launch: float = 0.0
    lag: float = 0.0

    def then(self, other: Busy) -> Busy:
        """Both, one after the other: where this one ends is where the other may begin."""
        return Busy(
            self.scope,
            self.name,
            self.seconds + other.seconds,
            self.flops + other.flops,
            self.forward_flops + other.forward_flops,
            self.kernels + other.kernels,
            self.launch + other.launch,
            max(self.lag + other.seconds, self.launch + other.lag),
        )


class Live(NamedTuple):
    """So many bytes are live from here on."""

    scope: Scope
    nbytes: int


Entry = Busy | Launch | Wait | Copy | Live
