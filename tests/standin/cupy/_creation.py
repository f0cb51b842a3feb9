"""cupy.empty, zeros and argsort."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy._array import ndarray, on_device
from cupy._clock import current_stream, launch
from cupy._state import LOCK


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    out = ndarray(shape, dtype)
    out.fill(0)
    return out


def argsort(a: ndarray, axis: int = -1) -> ndarray:
    """Stable, as CuPy's (thrust); its result comes from the current pool."""
    on_device(a)
    out = ndarray(a.shape, np.int64)
    with LOCK:
        work = launch(current_stream(), "argsort")
        values = a._touch(work, False)
        out._touch(work, True)[...] = np.argsort(values, axis=axis, kind="stable")
    return out
