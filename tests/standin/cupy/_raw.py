"""cupy.RawModule: a CUDA source compiled by g++ behind the emulation headers, its arguments held to its parameters.

Source: cupy/cuda/function.pyx (`_pointer`: Python ints are passed as 8 bytes, floats as double, NumPy scalars as they
are, arrays as pointers), CUDA C++ Programming Guide, table of launch limits.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from cupy._array import ndarray, on_device
from cupy._clock import StreamClock, current_stream, launch, submit
from cupy._compile import CompileException, library
from cupy._segments import check_ends, reach, touch
from cupy._state import LOCK, THREAD, StandinError, absent

STACK = 64 * 1024
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("shared", ctypes.c_void_p),
        ("stacks", ctypes.c_void_p),
        ("stack_bytes", ctypes.c_size_t),
        ("error", ctypes.c_void_p),
        ("error_bytes", ctypes.c_size_t),
    )


def code_of(dtype: np.dtype) -> str:
    """A dtype as `fibers.h` describes a C++ type: kind and bytes."""
    return "b2" if dtype == BFLOAT16 else "?1" if dtype == np.bool_ else f"{dtype.kind}{dtype.itemsize}"


def _stacks() -> int:
    if THREAD.stacks is None:
        THREAD.stacks = mmap.mmap(-1, 1024 * STACK + (1 << 18))
    return ctypes.addressof(ctypes.c_char.from_buffer(THREAD.stacks))


class RawModule:
    def __init__(
        self,
        code: str,
        *,
        options: Sequence[str] = (),
        backend: str = "nvrtc",
        name_expressions: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(options, tuple) or not all(isinstance(option, str) for option in options):
            raise TypeError(f"options must be a tuple of str, not {options!r}")
        self.code, self.options, self.backend = code, options, backend
        self.name_expressions = None if name_expressions is None else list(name_expressions)

    def _names(self) -> list[str]:
        if self.name_expressions is not None:
            return self.name_expressions
        return re.findall(
            r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s+)?(\w+)\s*\(', self.code
        )

    def _source(self) -> str:
        code = re.sub(
            r"extern\s+__shared__\s+((?:__align__\s*\(\s*\d+\s*\)\s+)?)([\w\s]+?)\s*\b(\w+)\s*\[\s*\]\s*;",
            r"\2* \3 = (\2*)standin::dynamic_shared();",
            self.code,
        )
        exports = "".join(
            f"typedef decltype(standin::call_of({name})) call_{k};\n"
            f'extern "C" void standin_signature_{k}(char* out) {{ call_{k}::signature(out); }}\n'
            f'extern "C" int standin_launch_{k}(void** args, standin::Launch* launch)'
            f" {{ return call_{k}::launch({name}, args, launch); }}\n"
            for k, name in enumerate(self._names())
        )
        return f'#include "cuda_emulation.h"\n{code}\n{exports}'

    def compile(self) -> None:
        library(self._source(), ", ".join(self._names()))

    def get_function(self, name: str) -> RawKernel:
        names = self._names()
        if name not in names:
            raise CompileException(f'{name} is neither in name_expressions nor an extern "C" kernel; there are {names}')
        return RawKernel(library(self._source(), name), names.index(name), name)

    def __getattr__(self, name: str) -> Any:
        raise absent("RawModule", name)


class RawKernel:
    """One kernel of a RawModule."""

    def __init__(self, built: ctypes.CDLL, number: int, name: str) -> None:
        text = ctypes.create_string_buffer(1024)
        getattr(built, f"standin_signature_{number}")(text)
        self._signature = [text.value.decode()[k : k + 3] for k in range(0, len(text.value), 3)]
        self._run = getattr(built, f"standin_launch_{number}")
        self.name = name
        self.max_dynamic_shared_size_bytes = 48 * 1024

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], *, shared_mem: int = 0
    ) -> None:
        grid, block = ((*dims, 1, 1)[:3] for dims in (tuple(grid), tuple(block)))
        self._check_dims(grid, block, shared_mem)
        if len(args) != len(self._signature):
            raise TypeError(f"{self.name} takes {len(self._signature)} arguments, and got {len(args)}")
        values = [self._argument(k, args) for k in range(len(args))]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        read = [
            (arg.data.ptr, arg.shape, arg.strides, arg.itemsize) if isinstance(arg, ndarray) else int(arg) if arg else 0
            for arg in (arg if kind[0] != "S" else 0 for kind, arg in zip(self._signature, args, strict=True))
        ]
        submit(current_stream(), lambda stream: self._launch(stream, grid, block, shared_mem, values, pointers, read))

    def _launch(
        self, stream: StreamClock, grid: Any, block: Any, shared_mem: int, values: Any, pointers: Any, read: list[Any]
    ) -> None:
        """Run it on the bytes of its arguments, whose memory it reads and writes; `values` keeps them."""
        error = ctypes.create_string_buffer(256)
        shared = ctypes.create_string_buffer(shared_mem + 16)
        call = _Launch(
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*block),
            shared_mem,
            -(-ctypes.addressof(shared) // 16) * 16,
            _stacks(),
            STACK,
            ctypes.addressof(error),
            256,
        )
        with LOCK:
            work = launch(stream, self.name)
            for kind, arg in zip(self._signature, read, strict=True):
                writes = kind[0] == "P"
                if isinstance(arg, tuple):
                    touch(work, *arg, writes)
                elif arg:
                    # how far the kernel goes from a bare address is not known: to the allocation's end
                    touch(work, arg, (reach(arg, self.name),), (1,), 1, writes)
        if self._run(pointers, ctypes.byref(call)):
            raise StandinError(f"{self.name}: {error.value.decode()}")
        for kind, arg in zip(self._signature, read, strict=True):
            if kind[0] == "P" and isinstance(arg, tuple) and 0 not in arg[1]:
                check_ends(arg[0], self.name)

    def _check_dims(self, grid: tuple[int, ...], block: tuple[int, ...], shared: int) -> None:
        threads = block[0] * block[1] * block[2]
        if min(*grid, *block) < 1 or threads > 1024 or block[2] > 64 or max(grid[1:]) > 65535 or grid[0] >= 2**31:
            raise StandinError(f"{self.name}: CUDA does not launch a grid of {grid} blocks of {block} threads")
        if shared > self.max_dynamic_shared_size_bytes:
            raise StandinError(f"{self.name}: {shared} bytes of shared memory, of {self.max_dynamic_shared_size_bytes}")

    def _argument(self, index: int, args: Sequence[Any]) -> Any:
        """The argument's bytes, as CuPy would pass them. Raises: TypeError where the kernel would read others."""
        kind, arg = self._signature[index], args[index]
        if isinstance(arg, ndarray):
            on_device(arg)
            code = code_of(arg.dtype)
            # One array twice, once under its own type: it stands in for an array that this call does without.
            stands_in = any(
                arg is other and kind[1:] == code for other, kind in zip(args, self._signature, strict=True)
            )
            if kind[0] == "S" or (kind[1:] != code and kind[1] != "v" and not stands_in):
                raise self._mismatch(index, f"an array of {arg.dtype}")
            return ctypes.c_void_p(arg.data.ptr)
        if type(arg) is bool:
            arg = np.bool_(arg)
        elif type(arg) is int:
            arg = np.int64(arg) if arg < 2**63 else np.uint64(arg)
        elif type(arg) is float:
            arg = np.float64(arg)
        if not isinstance(arg, np.generic):
            raise TypeError(f"{self.name}: Unsupported type {type(arg)}" + (" (a null pointer is 0)" * (arg is None)))
        if kind[0] != "S":
            if code_of(arg.dtype) not in ("i8", "u8"):
                raise self._mismatch(index, f"{arg!r} of {arg.dtype}")
            return ctypes.c_void_p(int(arg))
        code = code_of(arg.dtype)
        same_integer = code[0] in "iu" and kind[1] in "iu" and code[1] == kind[2] and int(arg) >= 0
        if code != kind[1:] and not same_integer:
            raise self._mismatch(index, f"{arg!r}, passed as {arg.dtype}")
        return (ctypes.c_char * arg.dtype.itemsize).from_buffer_copy(arg.tobytes())

    def _mismatch(self, index: int, got: str) -> TypeError:
        kind = self._signature[index]
        form = {"P": "a pointer to ", "C": "a pointer to const ", "S": ""}[kind[0]]
        return TypeError(
            f"{self.name}: parameter {index} is {form}{kind[1]}{kind[2]} (kind, bytes), and got {got}: "
            "CUDA would read other bytes"
        )
