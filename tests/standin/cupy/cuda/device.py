"""cupy.cuda.Device of the stand-in: a number, and whose turn it is on this thread."""

from __future__ import annotations

import itertools
from typing import Any

from cupy._clock import wait_device
from cupy._segments import device_used
from cupy._state import LOCK, MACHINE, THREAD, absent
from cupy.cuda import runtime

_handles = itertools.count(1)
HANDLES: dict[int, tuple[int, int]] = {}


class Device:
    def __init__(self, device: int | Device | None = None) -> None:
        self.id = THREAD.device if device is None else device.id if isinstance(device, Device) else int(device)
        if not 0 <= self.id < MACHINE.num_devices:
            raise runtime.CUDARuntimeError(101, "cudaErrorInvalidDevice: invalid device ordinal")

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return self.id

    def use(self) -> None:
        THREAD.device = self.id

    def __enter__(self) -> Device:
        THREAD.devices.append(THREAD.device)
        THREAD.device = self.id
        return self

    def __exit__(self, *_: Any) -> None:
        THREAD.device = THREAD.devices.pop()

    def synchronize(self) -> None:
        wait_device(self.id, "device.synchronize")

    @property
    def compute_capability(self) -> str:
        return "90"

    @property
    def mem_info(self) -> tuple[int, int]:
        with LOCK:
            return MACHINE.device_bytes - device_used(self.id), MACHINE.device_bytes

    @property
    def attributes(self) -> dict[str, int]:
        return {
            "MaxThreadsPerBlock": 1024,
            "WarpSize": 32,
            "MultiProcessorCount": 132,
            "ClockRate": 1980000,
            "MaxSharedMemoryPerBlock": 49152,
            "MaxSharedMemoryPerBlockOptin": 232448,
        }

    def __getattr__(self, name: str) -> Any:
        raise absent("Device", name)


def get_cublas_handle() -> int:
    """One per thread and device, as in CuPy."""
    device = THREAD.device
    if device not in THREAD.handles:
        handle = next(_handles)
        HANDLES[handle] = (id(THREAD.handles), device)
        THREAD.handles[device] = handle
    return THREAD.handles[device]


def handle_is_mine(handle: int) -> bool:
    return HANDLES.get(handle) == (id(THREAD.handles), THREAD.device)
