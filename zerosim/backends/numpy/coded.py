"""Codecs' rules on NumPy's arrays (`parallel/compression/codecs.py`, `groups.py`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zerosim.backends.kernels import Array


def coded(rule: Callable[..., None], *arrays: Array) -> None:
    rule(np, *arrays)
