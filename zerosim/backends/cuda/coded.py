"""Codecs' rules on CuPy's arrays (`parallel/compression/codecs.py`)."""

from __future__ import annotations

from collections.abc import Callable

import cupy as cp

from zerosim.backends.kernels import Array


def coded(rule: Callable[..., None], *arrays: Array) -> None:
    rule(cp, *arrays)
