"""The stand-in's own controls, for tests; the real CuPy has no such module."""

from __future__ import annotations

from cupy._clock import NULL, STREAMS, finish
from cupy._segments import LEAKED
from cupy._state import LOCK, MACHINE, RaceError, StandinError, Wait

__all__ = [
    "RaceError",
    "StandinError",
    "Wait",
    "forget_launches",
    "forget_waits",
    "launches",
    "reset",
    "set_device_bytes",
    "set_device_count",
    "waits",
]


def waits() -> list[Wait]:
    """Every time that the host waited for a device since `forget_waits`, with its place in the program."""
    with LOCK:
        return list(MACHINE.waits)


def forget_waits() -> None:
    with LOCK:
        MACHINE.waits.clear()


def launches() -> dict[str, int]:
    """Kernels, products and device copies since `forget_launches`: launched alone, captured; graphs launched, and what
    they launched."""
    with LOCK:
        return dict(MACHINE.launches)


def forget_launches() -> None:
    with LOCK:
        MACHINE.launches = dict.fromkeys(MACHINE.launches, 0)


def reset() -> None:
    """Between tests: whatever was launched is done, nothing was waited for, and there is one device."""
    with LOCK:
        for stream in [*STREAMS.values(), *NULL.values()]:
            stream.pending.clear()
            finish(dict(stream.seen))
        MACHINE.waits.clear()
        LEAKED.clear()
    MACHINE.num_devices, MACHINE.device_bytes = 1, 80 * 10**9


def set_device_count(count: int) -> None:
    MACHINE.num_devices = count


def set_device_bytes(nbytes: int) -> None:
    """How much memory each device has."""
    MACHINE.device_bytes = nbytes
