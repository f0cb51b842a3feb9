"""The strict array: what zerosim may do with a cupy.ndarray, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupy._clock import StreamClock, current_stream, finish, launch, stream_of, submit, wait_stream
from cupy._layout import Flags, address_of, c_strides, ghost_of
from cupy._memory import MemoryPointer, alloc
from cupy._segments import touch
from cupy._state import LOCK, THREAD, absent, count_wait

NUMPY = (
    "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly."
)


class ndarray:
    """Device memory under a shape. Its elements are reached by kernels, `set`, `get`, `fill` and copies only."""

    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None, strides: Any = None
    ) -> None:
        self.shape: tuple[int, ...] = tuple(
            int(size) for size in (shape if isinstance(shape, tuple | list) else (shape,))
        )
        self.dtype = np.dtype(dtype)
        self.itemsize = self.dtype.itemsize
        self.strides = c_strides(self.shape, self.itemsize) if strides is None else tuple(strides)
        self.size = math.prod(self.shape)
        self.data = memptr if memptr is not None else alloc(self.nbytes)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def flags(self) -> Flags:
        return Flags(self)

    @property
    def device(self) -> Any:
        from cupy.cuda.device import Device

        return Device(self.data.device_id)

    # -- views ----------------------------------------------------------------------------------
    def _ghost(self) -> tuple[np.ndarray, int]:
        return ghost_of(self.shape, self.strides, self.itemsize)

    def _viewed(self, like: np.ndarray, base: int) -> ndarray:
        at = address_of(like) - base if like.size else 0
        return ndarray(like.shape, self.dtype, self.data + at, like.strides)

    def reshape(self, *shape: Any) -> ndarray:
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if self.flags.c_contiguous:
            shape = tuple(np.broadcast_to(np.bool_(0), self.shape).reshape(wanted).shape)
            return ndarray(shape, self.dtype, self.data)
        ghost, base = self._ghost()
        seen = ghost.reshape(wanted)
        if not np.may_share_memory(seen, ghost):
            raise TypeError(
                f"reshape of a strided {self.shape} to {wanted} copies on the device, unasked: CuPy does, we may not"
            )
        return self._viewed(seen, base)

    def transpose(self, *axes: Any) -> ndarray:
        ghost, base = self._ghost()
        return self._viewed(ghost.transpose(*axes), base)

    @property
    def T(self) -> ndarray:
        return self.transpose()

    def swapaxes(self, axis1: int, axis2: int) -> ndarray:
        ghost, base = self._ghost()
        return self._viewed(ghost.swapaxes(axis1, axis2), base)

    def __getitem__(self, key: Any) -> ndarray:
        for part in key if isinstance(key, tuple) else (key,):
            if not (part is None or part is Ellipsis or isinstance(part, slice | int | np.integer)):
                raise TypeError(
                    f"only basic slicing: an index of {type(part).__name__} gathers through a kernel or the host"
                )
        whole = key if isinstance(key, tuple) else (key,)
        if Ellipsis not in whole:
            whole = (*whole, Ellipsis)  # so that an element stays an array of no dims, as in CuPy
        ghost, base = self._ghost()
        view = ghost[whole]
        if min(view.strides, default=0) < 0:
            raise TypeError("slices with a negative step are no part of what zerosim uses")
        return self._viewed(view, base)

    def view(self, dtype: Any = None) -> ndarray:
        if dtype is None or np.dtype(dtype) == self.dtype:
            return ndarray(self.shape, self.dtype, self.data, self.strides)
        wanted = np.dtype(dtype)
        if not self.flags.c_contiguous or not self.shape or self.shape[-1] * self.itemsize % wanted.itemsize:
            raise ValueError(f"{self.shape} of {self.dtype} cannot be seen as {wanted}")
        return ndarray((*self.shape[:-1], self.shape[-1] * self.itemsize // wanted.itemsize), wanted, self.data)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    # -- elements -------------------------------------------------------------------------------
    def _touch(self, work: Any, writes: bool) -> np.ndarray:
        """The elements as a NumPy view of the device's memory, recorded as read or written by `work`."""
        memory = touch(work, self.data.ptr, self.shape, self.strides, self.itemsize, writes)
        if memory is None:
            return np.empty(self.shape, self.dtype)
        return np.ndarray(self.shape, self.dtype, memory, strides=self.strides)

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        """As CuPy: from a NumPy array of the same shape and dtype; on the current stream where none is given."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not (self.flags.c_contiguous or self.flags.f_contiguous):
            raise RuntimeError("Cannot set to non-contiguous array")
        if self.size:
            with LOCK, self.device:
                clock = _clock_of(stream)
                work = launch(clock, "set")
                self._touch(work, True)[...] = arr
                _guard_source(clock, work.count, arr)

    def get(
        self, stream: Any = None, order: str = "C", out: np.ndarray | None = None, blocking: bool = True
    ) -> np.ndarray:
        """As CuPy: copies on the current stream where none is given, then waits for it."""
        if out is not None:
            if not isinstance(out, np.ndarray):
                raise TypeError(f"Only numpy.ndarray can be obtained from cupy.ndarray, not {type(out)}")
            if self.dtype != out.dtype:
                raise TypeError(f"{out.dtype} array cannot be obtained from {self.dtype} array")
            if self.shape != out.shape:
                raise ValueError(f"Shape mismatch. Expected shape: {self.shape}, actual shape: {out.shape}")
            if not out.flags.c_contiguous:
                raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        if not blocking:
            raise absent("ndarray", "get(blocking=False)")
        result = np.empty(self.shape, self.dtype) if out is None else out
        if self.size:
            with LOCK, self.device:
                clock = _clock_of(stream)
                result[...] = self._touch(launch(clock, "get"), False)
                wait_stream(clock, "get")
        return result

    def fill(self, value: Any) -> None:
        if isinstance(value, np.ndarray | ndarray):
            raise TypeError("fill takes a number")
        if self.size:
            on_device(self)
            ptr, shape, strides, dtype = self.data.ptr, self.shape, self.strides, self.dtype

            def fill(stream: StreamClock) -> None:
                with LOCK:
                    memory = touch(launch(stream, "fill"), ptr, shape, strides, dtype.itemsize, True)
                    np.ndarray(shape, dtype, memory, strides=strides)[...] = value

            submit(current_stream(), fill)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """For libraries that take a GPU's pointers, such as MPI; the memory is the host's in truth."""
        return {
            "shape": self.shape,
            "strides": None if self.flags.c_contiguous else self.strides,
            "typestr": self.dtype.str,
            "data": (self.data.ptr, False),
            "version": 3,
        }

    # -- refusals -------------------------------------------------------------------------------
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(NUMPY)

    def _element(self) -> Any:
        if self.size != 1:
            raise ValueError("only an array of one element is a number")
        count_wait("a Python number out of an array")
        with LOCK, self.device:
            clock = current_stream()
            value = self._touch(launch(clock, "item"), False).reshape(()).item()
            finish(dict(clock.seen))
        return value

    def item(self) -> Any:
        return self._element()

    def __bool__(self) -> bool:
        return bool(self._element())

    def __float__(self) -> float:
        return float(self._element())

    def __int__(self) -> int:
        return int(self._element())

    def __getattr__(self, name: str) -> Any:
        raise absent("ndarray", name)

    def __iter__(self) -> Any:
        raise absent("ndarray", "__iter__")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise absent("ndarray", "__setitem__")


def _clock_of(stream: Any) -> StreamClock:
    return current_stream() if stream is None else stream_of(stream.ptr)


def on_device(array: ndarray) -> None:
    if array.data.device_id != THREAD.device:
        raise ValueError(
            f"The device where the array resides ({array.data.device_id}) is different from the current device "
            f"({THREAD.device}). Peer access is unavailable between these devices."
        )


def _guard_source(clock: StreamClock, count: int, source: np.ndarray) -> None:
    """Pinned memory that an asynchronous copy reads must not change before the copy is known to be done."""
    from cupy._copy import guard

    guard(clock, count, source.ctypes.data, source.nbytes)


def _refuse(name: str) -> Any:
    def refused(self: ndarray, *_: Any) -> Any:
        raise TypeError(
            f"ndarray.{name}: zerosim computes through kernels; operators hide allocations and mixing with NumPy arrays"
        )

    return refused


BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
for _name in BINARY:
    for _form in (f"__{_name}__", f"__r{_name}__", f"__i{_name}__"):
        setattr(ndarray, _form, _refuse(_form))
for _name in ["eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"]:
    setattr(ndarray, f"__{_name}__", _refuse(f"__{_name}__"))
