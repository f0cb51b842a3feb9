"""The stand-in's own controls, for tests; the real CuPy has no such module."""

from __future__ import annotations

from cupy._clock import NULL, STREAMS, finish
from cupy._segments import LEAKED
from cupy._state import LOCK, MACHINE, RaceError, StandinError, Wait

__all__ = [
    "RaceError",
    "StandinError",
    "Wait",
    "forget_waits",
    "launches",
    "reset",
    "set_device_bytes",
    "set_device_count",
    "set_patience",
    "set_thread_order",
    "waits",
]


def waits() -> list[Wait]:
    """Every time that the host waited for a device since `forget_waits`, with its place in the program."""
    with LOCK:
        return list(MACHINE.waits)


def forget_waits() -> None:
    with LOCK:
        MACHINE.waits.clear()


def launches() -> int:
    """How many kernels and copies have been launched since the process began."""
    return MACHINE.launches


def reset() -> None:
    """Between tests: whatever was launched is done, nothing was waited for, and there is one device."""
    with LOCK:
        for stream in [*STREAMS.values(), *NULL.values()]:
            stream.pending.clear()
            finish(dict(stream.seen))
        MACHINE.waits.clear()
        LEAKED.clear()
    MACHINE.num_devices, MACHINE.device_bytes = 1, 80 * 10**9
    MACHINE.thread_order, MACHINE.patience_s = "alternate", 10.0


def set_device_count(count: int) -> None:
    MACHINE.num_devices = count


def set_device_bytes(nbytes: int) -> None:
    """How much memory each device has."""
    MACHINE.device_bytes = nbytes


def set_patience(seconds: float) -> None:
    """After how long a rank that waits for the others in NCCL is said to hang."""
    MACHINE.patience_s = seconds


def set_thread_order(order: str) -> None:
    """In which order a kernel's threads and blocks run: "forward", "reverse", or "alternate" (the default: every other
    block backwards), so that a missing __syncthreads shows."""
    if order not in ("forward", "reverse", "alternate"):
        raise ValueError(f"order {order!r}: forward, reverse or alternate")
    MACHINE.thread_order = order
