"""libcublas.so itself, for callers that are not CuPy: a library with its name, whose functions come back to Python.

What goes through it are C's own types, so a wrong signature on the caller's side shows here too.

Source: cuBLAS documentation (cublasSetStream resets the workspace; a product on a capturing stream needs one of its
own, or allocates).
"""

from __future__ import annotations

import ctypes
import itertools
import traceback
from collections.abc import Callable
from ctypes import c_int, c_longlong, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

from cupy._clock import StreamClock, null_stream, stream_of
from cupy._compile import library
from cupy._state import THREAD

SONAME = "libcublas.so.13"
VERSION = (13, 0, 0)
SUCCESS, NOT_INITIALIZED, INVALID_VALUE, EXECUTION_FAILED, NOT_SUPPORTED = 0, 1, 7, 13, 15
GEMM = (
    *(c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p),
    *(c_void_p, c_int, c_int, c_longlong, c_void_p, c_int, c_int, c_longlong, c_void_p),
    *(c_void_p, c_int, c_int, c_longlong, c_int, c_int, c_int),
)
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cublasCreate_v2": (c_void_p,),
    "cublasDestroy_v2": (c_void_p,),
    "cublasGetProperty": (c_int, c_void_p),
    "cublasSetStream_v2": (c_void_p, c_void_p),
    "cublasSetWorkspace_v2": (c_void_p, c_void_p, c_size_t),
    "cublasSetMathMode": (c_void_p, c_int),
    "cublasGemmStridedBatchedEx": GEMM,
}
C = {c_void_p: "void*", c_int: "int", c_longlong: "long long", c_size_t: "unsigned long"}


@dataclass(slots=True)
class Handle:
    """What a cublasHandle_t holds."""

    device: int
    stream: StreamClock
    workspace: tuple[int, int] = (0, 0)


HANDLES: dict[int, Handle] = {}
_numbers = itertools.count(0x1000)


def _source() -> str:
    lines = []
    for name, types in SIGNATURES.items():
        words = ", ".join(f"{C[kind]} a{k}" for k, kind in enumerate(types))
        names = ", ".join(f"a{k}" for k in range(len(types)))
        lines.append(f'extern "C" {{ int (*standin_{name})({words}) = 0; int {name}({words})')
        lines.append(f"    {{ return standin_{name}({names}); }} }}")
    return "\n".join(lines)


def load(gemm: Callable[..., None]) -> Any:
    """Build and load it. The returned functions must outlive it."""
    loaded = library(_source(), SONAME, SONAME)
    kept = []
    for name, types in SIGNATURES.items():
        run = ctypes.CFUNCTYPE(c_int, *types)(_status(globals()[f"_{name}"], gemm))
        c_void_p.in_dll(loaded, f"standin_{name}").value = ctypes.cast(run, c_void_p).value
        kept.append(run)
    return loaded, kept


def _status(act: Callable[..., int], gemm: Callable[..., None]) -> Callable[..., int]:
    """C knows no exceptions: what went wrong is printed, and a status goes back."""

    def run(*words: Any) -> int:
        try:
            return act(gemm, *words) if act is _cublasGemmStridedBatchedEx else act(*words)
        except Exception as error:
            traceback.print_exc()
            return NOT_SUPPORTED if "NOT_SUPPORTED" in str(error) else EXECUTION_FAILED

    return run


def _cublasCreate_v2(out: int) -> int:
    number = next(_numbers)
    HANDLES[number] = Handle(THREAD.device, null_stream(THREAD.device))
    c_void_p.from_address(out).value = number
    return SUCCESS


def _cublasDestroy_v2(handle: int) -> int:
    return SUCCESS if HANDLES.pop(handle, None) is not None else NOT_INITIALIZED


def _cublasGetProperty(kind: int, out: int) -> int:
    c_int.from_address(out).value = VERSION[kind]
    return SUCCESS


def _cublasSetStream_v2(handle: int, stream: int | None) -> int:
    found = HANDLES.get(handle)
    if found is None:
        return NOT_INITIALIZED
    found.stream, found.workspace = stream_of(stream or 0), (0, 0)
    return SUCCESS


def _cublasSetWorkspace_v2(handle: int, memory: int | None, nbytes: int) -> int:
    found = HANDLES.get(handle)
    if found is None:
        return NOT_INITIALIZED
    if (memory or 0) % 256:
        return INVALID_VALUE
    found.workspace = memory or 0, nbytes
    return SUCCESS


def _cublasSetMathMode(handle: int, mode: int) -> int:
    if handle not in HANDLES:
        return NOT_INITIALIZED
    return SUCCESS if mode in (0, 16) else INVALID_VALUE


def _cublasGemmStridedBatchedEx(gemm: Callable[..., None], handle: int, *words: Any) -> int:
    found = HANDLES.get(handle)
    if found is None or found.device != THREAD.device:
        return NOT_INITIALIZED
    if found.stream.capture is not None and not found.workspace[1]:
        found.stream.capture.broken = True  # it would allocate
        return EXECUTION_FAILED
    ta, tb, m, n, k, alpha, a, at, lda, sa, b, bt, ldb, sb, beta, c, ct, ldc, sc, batch, compute, algo = words
    gemm(
        "cublasGemmStridedBatchedEx", found.stream, ta, tb, m, n, k, alpha, (a, at, lda, sa), (b, bt, ldb, sb), beta,
        (c, ct, ldc, sc), batch, compute, algo, found.workspace,
    )  # fmt: skip
    return SUCCESS
