"""A strict stand-in for CuPy where no GPU is: the part of its interface that zerosim uses, executed on the CPU.

Not CuPy, and nothing to do with it but the names: see `standin.py` for what tests may ask of it.
"""

from __future__ import annotations

from typing import Any

from cupy import cuda, standin
from cupy._array import ndarray
from cupy._creation import argsort, empty, zeros
from cupy._elementwise import ElementwiseKernel
from cupy._raw import RawKernel, RawModule
from cupy._state import absent

__version__ = "14.2.0"
__all__ = ["ElementwiseKernel", "RawKernel", "RawModule", "argsort", "cuda", "empty", "ndarray", "standin", "zeros"]


def __getattr__(name: str) -> Any:
    raise absent("cupy", name)
