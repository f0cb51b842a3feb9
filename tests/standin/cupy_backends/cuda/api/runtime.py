"""The CUDA runtime's calls that zerosim makes."""

from __future__ import annotations

from typing import Any

from cupy._copy import memcpy as memcpy
from cupy._copy import memcpy_async, memcpy_peer_async
from cupy._state import MACHINE, absent

memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = range(5)
streamCaptureModeGlobal, streamCaptureModeThreadLocal, streamCaptureModeRelaxed = range(3)
CUDA_R_32F, CUDA_R_64F, CUDA_R_16F, CUDA_R_16BF = 0, 1, 2, 14
memcpyAsync = memcpy_async
memcpyPeerAsync = memcpy_peer_async


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, text: str = "") -> None:
        self.status = status
        super().__init__(text or f"CUDA error {status}")


def getDeviceCount() -> int:
    if MACHINE.num_devices == 0:
        raise CUDARuntimeError(100, "cudaErrorNoDevice: no CUDA-capable device is detected")
    return MACHINE.num_devices


def getDeviceProperties(device: int) -> dict[str, Any]:
    return {
        "name": b"zerosim stand-in",
        "totalGlobalMem": MACHINE.device_bytes,
        "multiProcessorCount": 132,
        "major": 9,
        "minor": 0,
        "warpSize": 32,
        "clockRate": 1980000,
        "memoryClockRate": 2619000,
        "memoryBusWidth": 5120,
        "sharedMemPerBlock": 49152,
        "maxThreadsPerBlock": 1024,
    }


def driverGetVersion() -> int:
    return 13000


def runtimeGetVersion() -> int:
    return 13000


def __getattr__(name: str) -> Any:
    raise absent("cupy.cuda.runtime", name)
