"""Largest differences, printed beside what is allowed (`pytest -rP` shows them), and held to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def within(what: str, got: Any, expected: Any, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    """|got - expected| <= atol + rtol * max|expected|, for every element. rtol is of the LARGEST value, not of each."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, PyTorch's is {expected.shape}"
    allowed = atol + rtol * float(np.abs(expected).max(initial=0.0))
    worst = float(np.abs(got - expected).max(initial=0.0))
    print(f"{what}: largest difference {worst:.2e}, allowed {allowed:.2e}")
    assert worst <= allowed, f"{what} differs from PyTorch by up to {worst:.3e}, allowed {allowed:.3e}"


def compared(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Weights as float64, without key biases.

    Softmax does not see a constant added to all scores of a query: the true gradient of a key bias
    is 0, what is computed is rounding, and Adam makes whole steps of it.
    """
    chosen = {}
    for name, values in weights.items():
        values = np.asarray(values, np.float64)
        if name.endswith("attn.c_attn.bias"):
            width = len(values) // 3
            values = np.concatenate([values[:width], values[2 * width :]])
        chosen[name] = values
    return chosen


def weights_within(what: str, got: Mapping[str, Any], expected: Mapping[str, Any], atol: float) -> None:
    assert got.keys() == expected.keys()
    got, expected = compared(got), compared(expected)
    worst = {name: float(np.abs(got[name] - expected[name]).max()) for name in expected}
    name = max(worst, key=lambda each: worst[each])
    print(f"{what}: largest difference {worst[name]:.2e} in {name}, allowed {atol:.2e}")
    assert worst[name] <= atol, f"{what}: {name} differs from PyTorch's by up to {worst[name]:.3e}, allowed {atol:.3e}"
