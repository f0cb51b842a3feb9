"""The parameters of an ElementwiseKernel: how CuPy reads their text, and the form in which the compiled body gets them.

Source: cupy/_core/_kernel.pyx (ParameterInfo), cupy/_core/_scalar.pyx. The structures' twins are in include/carray.h.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupy._array import ndarray
from cupy._state import StandinError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TYPENAMES = {
    np.dtype(np.float64): "double",
    np.dtype(np.float32): "float",
    np.dtype(np.float16): "float16",
    BFLOAT16: "bfloat16",
    np.dtype(np.int64): "long long",
    np.dtype(np.uint64): "unsigned long long",
    np.dtype(np.int32): "int",
    np.dtype(np.uint32): "unsigned int",
    np.dtype(np.int16): "short",
    np.dtype(np.uint16): "unsigned short",
    np.dtype(np.int8): "signed char",
    np.dtype(np.uint8): "unsigned char",
    np.dtype(np.bool_): "bool",
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of `T x, raw U y, float32 s`; as in CuPy, a type name is NumPy's: `float` is float64, `int` is int64."""

    name: str
    ctype: str
    dtype: np.dtype | None
    raw: bool


def parameters(text: str) -> tuple[Parameter, ...]:
    found = []
    for part in text.strip().split(",") if text else ():
        words = part.split()
        if len(words) < 2 or any(word != "raw" for word in words[:-2]):
            raise StandinError(f"Syntax error: {part}")
        kind, name = words[-2:]
        dtype = None if len(kind) == 1 else BFLOAT16 if kind == "bfloat16" else np.dtype(kind)
        found.append(Parameter(name, kind if dtype is None else TYPENAMES[dtype], dtype, "raw" in words[:-2]))
    return tuple(found)


class CArray(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_ssize_t),
        ("ndim", ctypes.c_ssize_t),
        ("contiguous", ctypes.c_ssize_t),
        ("shape", ctypes.c_ssize_t * 16),
        ("strides", ctypes.c_ssize_t * 16),
    )


class CIndexer(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_ssize_t),
        ("ndim", ctypes.c_ssize_t),
        ("shape", ctypes.c_ssize_t * 16),
        ("index", ctypes.c_ssize_t * 16),
    )


def sixteen(values: Any) -> Any:
    return (ctypes.c_ssize_t * 16)(*values)


def carray(array: ndarray, shape: tuple[int, ...] | None, loop: tuple[int, ...]) -> CArray:
    if shape is None:
        dims, strides = array.shape, array.strides
    elif loop != shape:  # all contiguous, seen as one dim
        dims, strides = loop, (array.itemsize,)
    else:
        missing = len(shape) - array.ndim
        dims = shape
        strides = (0,) * missing + tuple(
            0 if size == 1 else stride for size, stride in zip(array.shape, array.strides, strict=True)
        )
    size = math.prod(dims)
    contiguous = array.flags.c_contiguous and size == array.size
    return CArray(array.data.ptr, size, len(dims), int(contiguous), sixteen(dims), sixteen(strides))


def scalar(value: Any, dtype: np.dtype, what: str) -> Any:
    if dtype.kind in "iu" and float(value) != int(value):
        raise TypeError(f"{what} is {dtype} and got {value!r}")
    return (ctypes.c_char * dtype.itemsize).from_buffer_copy(np.array(value).astype(dtype).tobytes())
