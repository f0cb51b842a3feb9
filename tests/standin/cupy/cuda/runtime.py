"""cupy.cuda.runtime of the stand-in: as in CuPy, the names of cupy_backends.cuda.api.runtime."""

from __future__ import annotations

from typing import Any

from cupy_backends.cuda.api import runtime as _runtime
from cupy_backends.cuda.api.runtime import CUDARuntimeError, getDeviceCount

__all__ = ["CUDARuntimeError", "getDeviceCount"]


def __getattr__(name: str) -> Any:
    return getattr(_runtime, name)
