"""cuBLAS called through ctypes, with a handle, a stream and a workspace of each rank's own.

CuPy sets a handle's stream at every call, and refuses a stream that is being captured as a CUDA graph. cuBLAS itself
does not, if its stream and workspace were set before: this handle's never change. Setting a stream resets the
workspace, so the stream comes first. Scalars are read from the host at the call, and a graph repeats their values.

Only `--capture-graphs` multiplies through here. No GPU has run it yet: tests run it on the stand-in for CuPy.

Source: cuBLAS library, 2.1.3 (streams), 2.1.9 (CUDA graphs), 2.4.7 (cublasSetStream), 2.4.8 (cublasSetWorkspace: 32 MiB
on compute capability 9 and newer, 4 MiB before), 2.8.13 (cublasGemmStridedBatchedEx); CuPy 14,
`cupy_backends/cuda/libs/cublas.pyx` (setStream).
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_int, c_longlong, c_size_t, c_void_p
from functools import cache
from typing import Any
from weakref import finalize

import cupy as cp

MAJOR_VERSION = 0
"""libraryPropertyType, library_types.h."""

_MATRIX = (c_void_p, c_int, c_int, c_longlong)
_SIGNATURES = {
    "cublasCreate_v2": (c_void_p,),
    "cublasDestroy_v2": (c_void_p,),
    "cublasGetProperty": (c_int, c_void_p),
    "cublasSetStream_v2": (c_void_p, c_void_p),
    "cublasSetWorkspace_v2": (c_void_p, c_void_p, c_size_t),
    "cublasSetMathMode": (c_void_p, c_int),
    "cublasGemmStridedBatchedEx": (
        *(c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p),
        *(*_MATRIX, *_MATRIX, c_void_p, *_MATRIX, c_int, c_int, c_int),
    ),
}


class LibraryError(RuntimeError):
    """A library that does not load, is of another CUDA than CuPy's, or refuses a call."""


@cache
def cublas_library() -> Any:
    """Return the cuBLAS that CuPy has loaded. Raises: LibraryError."""
    from cupy_backends.cuda.libs import cublas  # finds it, in a wheel too, and loads it

    assert cublas is not None
    wanted = cp.cuda.runtime.runtimeGetVersion() // 1000
    name = f"cublas64_{wanted}.dll" if os.name == "nt" else f"libcublas.so.{wanted}"
    try:
        library = ctypes.CDLL(name)
        for function, arguments in _SIGNATURES.items():
            getattr(library, function).argtypes = arguments
    except (OSError, AttributeError) as error:
        raise LibraryError(f"{name} does not load ({error})") from error
    found = c_int()
    _check("cublasGetProperty", library.cublasGetProperty(MAJOR_VERSION, ctypes.addressof(found)))
    if found.value != wanted:
        raise LibraryError(f"{name} is cuBLAS {found.value}, and CuPy is built for CUDA {wanted}")
    return library


def _check(name: str, status: int) -> None:
    if status:
        raise LibraryError(f"{name} returns status {status} (cublasStatus_t)")


class Cublas:
    """A handle whose stream and workspace never change. Made, and used, while its GPU is current.

    The caller keeps the stream and the workspace's memory alive, and lets one thread multiply at a time.
    """

    def __init__(self, stream: int, workspace: int, nbytes: int, math_mode: int) -> None:
        self._library, handle = cublas_library(), c_void_p()
        _check("cublasCreate", self._library.cublasCreate_v2(ctypes.addressof(handle)))
        self._handle = handle.value
        finalize(self, self._library.cublasDestroy_v2, self._handle).atexit = False
        _check("cublasSetStream", self._library.cublasSetStream_v2(self._handle, stream))
        _check("cublasSetWorkspace", self._library.cublasSetWorkspace_v2(self._handle, workspace, nbytes))
        _check("cublasSetMathMode", self._library.cublasSetMathMode(self._handle, math_mode))

    def gemm(self, *words: int) -> None:
        """Multiply as cublasGemmStridedBatchedEx does, whose arguments follow the handle. Raises: LibraryError."""
        _check("cublasGemmStridedBatchedEx", self._library.cublasGemmStridedBatchedEx(self._handle, *words))


def workspace_bytes() -> int:
    """Return the size of workspace that cuBLAS recommends for the current GPU."""
    return (32 if int(cp.cuda.Device().compute_capability) >= 90 else 4) * 2**20
