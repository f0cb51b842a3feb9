"""ZeRO-Infinity's Figure 2a (arXiv 2104.07857): ten cells of states and checkpoints to their printed digits."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction

import pytest

from zerosim.analysis import formulas

# layers, hidden, heads; states and checkpoints in TB of 2^40 bytes; working memory of both kinds in GB of
# 2^30. K is 1024. Checkpoints are of 32 rows a node, the working memory is of 4 rows a GPU.
ROWS = [
    (80, 10240, 128, "1.83", "0.05", "1.95", "1.63"),
    (100, 20480, 160, "9.16", "0.12", "6.25", "2.50"),
    (128, 25600, 256, "18.31", "0.20", "9.77", "3.56"),
    (195, 65536, 512, "182.81", "0.76", "64.00", "8.00"),
    (315, 163840, 1024, "1845.70", "3.08", "400.00", "18.00"),
]
SLIP = "1.95"
"""16h² of h = 10,240 is 1.5625 GB. The cell that the paper prints is no rounding of it: a slip."""


def printed(value: Fraction, like: str) -> str:
    """The value in as many digits after the point."""
    exact = Decimal(value.numerator) / Decimal(value.denominator)
    return str(exact.quantize(Decimal(like), ROUND_HALF_UP))


@pytest.mark.parametrize(("layers", "hidden", "heads", "states", "checkpoints", "largest", "activations"), ROWS)
def test_figure_2a(
    layers: int, hidden: int, heads: int, states: str, checkpoints: str, largest: str, activations: str
) -> None:
    held = {"l": layers, "h": hidden, "a": heads, "s": 1024, "ci": 1}
    assert printed(formulas.infinity_states().at(held) / 2**40, states) == states
    assert printed(formulas.infinity_checkpoints().at(held | {"b": 32}) / 2**40, checkpoints) == checkpoints
    working, between = (form.at(held | {"b": 4}) / 2**30 for form in formulas.infinity_working_memory())
    assert printed(between, activations) == activations
    if largest == SLIP:
        assert working == Fraction("1.5625")
    else:
        assert printed(working, largest) == largest


def test_20_bytes_of_a_parameter_are_those_of_a_step_with_fp32_gradients() -> None:
    """12lh² parameters, of which DeepSpeed's step holds 2 + 2 + 12 bytes and an fp32 gradient's 4."""
    cost = formulas.bytes_per_parameter(2, 2, 2)
    step = formulas.total(formulas.optimizer_step_states(3, cost, upcast_grads=True).values())
    layers, hidden = 128, 25600
    psi = formulas.twelve_l_h_squared(layers, hidden)
    assert step.at({"\u03a8": psi, "N": 1}) == formulas.infinity_states().at({"l": layers, "h": hidden})
