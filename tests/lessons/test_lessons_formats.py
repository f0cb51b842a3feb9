"""The pictures of number formats, drawn from bit patterns as notebook 02 draws them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from zerosim.errors import InputError
from zerosim.lessons.formats import Limits, range_figure, ticks_figure
from zerosim.tensor import tensor


def halves() -> dict[str, Any]:
    """Every positive finite number of each half type."""
    patterns = np.arange(1, 2**15, dtype=np.uint16)
    values = {"fp16": patterns.view(np.float16), "bf16": (patterns.astype(np.uint32) << 16).view(np.float32)}
    return {name: every[np.isfinite(every)].astype(np.float32) for name, every in values.items()}


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_every_half_value_is_kept_and_the_middle_goes_to_even(name: str) -> None:
    values = halves()[name]
    assert np.array_equal(tensor(values, dtype=name).numpy(), values)
    assert (np.diff(values) > 0).all()
    start = int(np.searchsorted(values, 1.0))
    low, middle, high = values[start], (values[start] + values[start + 1]) / 2, values[start + 2]
    assert tensor(middle, dtype=name).numpy() == low  # 1 ends in a 0
    assert tensor((values[start + 1] + high) / 2, dtype=name).numpy() == high


def test_a_tick_for_every_number() -> None:
    (axes,) = ticks_figure(halves(), 1, 1.0625).axes
    assert sorted(len(collection.get_segments()) for collection in axes.collections) == [9, 65]
    with pytest.raises(InputError, match="wider range"):
        ticks_figure(halves(), 1.001, 1.0011)


def test_a_bar_for_every_format_and_a_hill_for_every_scale() -> None:
    limits = {name: Limits(2.0**-24, 2.0**-14, 65504.0, 2.0**-10) for name in ("fp16", "bf16", "fp32")}
    (axes,) = range_figure(limits, np.array([1e-3, -1e-4, 0.0]), (1.0, 2.0**16)).axes
    words = {text.get_text() for text in axes.texts}
    assert {"fp16", "bf16", "fp32", "gradients", "gradients times 2¹⁶", "2⁻²⁴"} <= words
