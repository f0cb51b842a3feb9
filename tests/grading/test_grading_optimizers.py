"""The exercises on optimizers and few bits: what is wrong with an answer is found, and said."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from grading_here import grade

from zerosim.optim.elementwise import Elementwise, Now
from zerosim.optim.radam import RAdam


def adagrad(step: Any) -> type[Elementwise]:
    """An answer whose rule is `step(w, g, now, total)`."""

    class Mine(Elementwise):
        states = ("sum",)
        flops = 7

        def rule(self, xp: Any, w: Any, g: Any, now: Now, *states: Any) -> None:
            g += now.weight_decay * w
            step(w, g, now, *states)

    return Mine


def inside(w: Any, g: Any, now: Now, total: Any) -> None:
    total += g * g
    w -= now.lr * g / np.sqrt(total + 1e-8)


def elsewhere(w: Any, g: Any, now: Now, total: Any) -> None:
    total += g * g
    w = w - now.lr * g / (np.sqrt(total) + 1e-8)


def forgetful(w: Any, g: Any, now: Now, total: Any) -> None:
    total[...] = g * g
    w -= now.lr * g / (np.sqrt(total) + 1e-8)


def undecayed(w: Any, g: Any, now: Now, total: Any) -> None:
    g -= now.weight_decay * w
    total += g * g
    w -= now.lr * g / (np.sqrt(total) + 1e-8)


def by_position(w: Any, g: Any, now: Now, total: Any) -> None:
    """Right for all weights at once, and for no slice of them."""
    total += g * g
    w -= now.lr * g / (np.sqrt(total) + 1e-8) + (0 if len(w) == 64 else 1e-12)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("step", "counted", "hint"),
    [
        (inside, "step 1 makes weight", "eps is added outside the root"),
        (elsewhere, "step 1 leaves the weights unchanged", "in place"),
        (forgetful, "step 2 makes weight", "under the root"),
        (undecayed, "step 1 with weight decay 0.01 makes weight", "add decay to the gradient before"),
        (by_position, "step 1 on slices differs from a slice of the whole step", "on other weights"),
    ],
)
def test_a_rule_that_is_not_adagrad(step: Any, counted: str, hint: str) -> None:
    found = grade(adagrad(step), "adagrad")
    assert (found.state, found.points, found.possible) == ("failed", 0, 3)
    assert counted in found["steps"].counted
    assert hint in found["steps"].hint


class Early(RAdam):
    """The paper's own border."""

    def rectification(self, step: int) -> float | None:
        most = 2.0 / (1.0 - self.beta2) - 1.0
        now = most - 2.0 * step * self.beta2**step / (1.0 - self.beta2**step)
        top, bottom = (now - 4) * (now - 2) * most, (most - 4) * (most - 2) * now
        return math.sqrt(top / bottom) if now > 4 else None


def test_the_border_of_radam_is_its_sixth_step() -> None:
    assert "step 5 makes weight" in grade(Early, "radam")["steps"].counted


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda values, table: (np.searchsorted(table, values / abs(values).max()).astype(np.uint8), 1.0), "scale is"),
        (
            lambda values, table: (
                np.searchsorted(table, values / abs(values).max()).clip(0, 255).astype(np.uint8), abs(values).max(),
            ),
            "nearest is",
        ),
        (lambda values, table: (np.zeros(len(values), np.int64), 1.0), "codes of int64"),
        (lambda values, table: values, "expected codes and scale"),
    ],
)  # fmt: skip
def test_a_quantiser_that_is_not_the_nearest(answer: Any, words: str) -> None:
    found = grade(answer, "quantiser")
    assert found.points == 0
    assert words in found["codes"].counted


def rounded(values: Any, drawn: Any) -> Any:
    """One more often than the chance has it: drawn 0 goes up where nothing is cut off."""
    bits = values.view(np.uint32)
    return ((bits & 0xFFFF0000) + ((drawn <= (bits & 0xFFFF)).astype(np.uint32) << 16)).view(np.float32)


def nearest(values: Any, drawn: Any) -> Any:
    bits = values.view(np.uint32)
    return ((bits & 0xFFFF0000) + (((bits & 0xFFFF) >= 0x8000).astype(np.uint32) << 16)).view(np.float32)


@pytest.mark.parametrize(("answer", "words"), [(rounded, "0.0 and -0.0"), (nearest, "1 + 2**-9")])
def test_a_rounding_that_is_off_by_a_draw(answer: Any, words: str) -> None:
    found = grade(answer, "rounding")
    assert found.points == 0
    assert words in found["bits"].counted
