"""The exercises on optimizers: element-wise rules, and states in few bits.

A rule is first asked directly: steps are compared with the formula in float64, slices with the whole, to the bit. Then
it trains, and must come as far as zerosim's own. The two functions on bits are only asked. Sources: Duchi et al.
(2011), Liu et al. (1908.03265), Dettmers et al. (2110.02861), beside PyTorch, bitsandbytes and torchao.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from zerosim.grading.adapting import class_of
from zerosim.grading.arrays import wrong_codes, wrong_nearest
from zerosim.grading.asking import Examination, Keep, Wrong
from zerosim.grading.exercise import Comparison
from zerosim.grading.plain import shown
from zerosim.grading.trial import Own, result_of
from zerosim.grading.verdict import Check
from zerosim.optim.elementwise import Elementwise, Now

EPS, BETA1, BETA2, LR, DECAY = 1e-8, 0.9, 0.999, 0.1, 0.01
Formula = Callable[[Any, Any, int, list[Any]], Any]
"""A step in float64: returns the new weights from w, g, t and the states, which it updates in place."""


def rule(answer: Any) -> Own:
    """Make a run with an optimizer of the given class. Raises: InputError for anything else."""
    return Own(optimizer=class_of(answer, Elementwise, "has no rule")())


def adagrad(w: Any, g: Any, t: int, states: list[Any]) -> Any:
    states[0] += g * g
    return w - LR * g / (np.sqrt(states[0]) + EPS)


def radam(w: Any, g: Any, t: int, states: list[Any]) -> Any:
    m, v = states
    m += (1 - BETA1) * (g - m)
    v += (1 - BETA2) * (g * g - v)
    most = 2 / (1 - BETA2) - 1
    rho = most - 2 * t * BETA2**t / (1 - BETA2**t)
    first = m / (1 - BETA1**t)
    if rho <= 5:
        return w - LR * first
    r = math.sqrt((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho))
    return w - LR * r * first * math.sqrt(1 - BETA2**t) / (np.sqrt(v) + EPS)


RUNS: tuple[float | None, ...] = (0.0, DECAY, None)
"""Steps without decay, and with; then eight steps of the whole and of slices of it."""
ROOT = "follow one weight by hand: what sum is under the root after each step? eps is added outside the root"
RHO = "at rho <= 5 step along m / (1 - beta1**t) only; above, multiply by r and apply v's correction sqrt(1 - beta2**t)"
STEPS = (*range(1, 13), 1000, 3000, 10_000)
"""The numbers of the steps: the first ones, and some in which powers of the betas are small."""


def steps(formula: Formula, names: tuple[str, ...], hint: str) -> Examination:
    """Return the questions on a rule: steps against `formula`, and slices against the whole."""

    def ask(answer: Any, decay: Any, keep: Keep) -> None:
        mine = answer()
        if decay is None:
            return _ask_slices(mine, len(names), keep)
        if keep(mine.states) != names:
            return None
        ours = _start(len(names))
        for t in STEPS:
            mine.rule(np, ours[0], _gradient(t), Now(LR, t, decay), *ours[1:])
            keep(ours[0])
        return None

    def words(decay: Any, came: Sequence[Any]) -> str:
        if decay is None:
            return f"step {len(came) + 1} on slices"
        return f"step {STEPS[max(len(came), 1) - 1]}" + (f" with weight decay {decay:g}" if decay else "")

    def wrong(decay: Any, came: Sequence[Any]) -> Wrong | None:
        if decay is None:
            return _wrong_slices(came)
        if came and came[0] != names:
            return f"states is {shown(came[0])}, expected {names}", "their names, in this order"
        theirs = _start(len(names))
        for number, (t, ours) in enumerate(zip(STEPS, came[1:], strict=False), 1):
            theirs[0] = formula(theirs[0], _gradient(t) + decay * theirs[0], t, theirs[1:])
            if not np.allclose(ours, theirs[0], rtol=1e-9, atol=1e-12):
                return _likeness(words(decay, came[:number]), t, ours, theirs[0], decay, hint)
        return None

    return Examination(lambda seed: RUNS, ask, words, wrong)


def _ask_slices(mine: Any, states: int, keep: Keep) -> None:
    whole, parts = _start(states), _start(states)
    for t in range(1, 9):
        mine.rule(np, whole[0], _gradient(t), Now(LR, t, DECAY), *whole[1:])
        for start, stop in pairwise((0, 7, 32, 33, 64)):
            each = [array[start:stop] for array in parts]
            mine.rule(np, each[0], _gradient(t)[start:stop], Now(LR, t, DECAY), *each[1:])
        keep((whole[0], parts[0]))


def _wrong_slices(came: Sequence[Any]) -> Wrong | None:
    for t, (whole, parts) in enumerate(came, 1):
        if not np.array_equal(whole, parts):
            words = f"step {t} on slices differs from a slice of the whole step"
            return words, "a weight's step must not depend on other weights"
    return None


def _start(num_states: int) -> list[Any]:
    """Return weights, and states of zeros, in float64."""
    return [np.random.default_rng(0).standard_normal(64), *(np.zeros(64) for _ in range(num_states))]


def _gradient(t: int) -> Any:
    return np.random.default_rng(t).standard_normal(64)


def _likeness(asked: str, t: int, ours: Any, theirs: Any, decay: float, hint: str) -> tuple[str, str]:
    if t == 1 and np.array_equal(ours, _start(0)[0]):
        return f"{asked} leaves the weights unchanged", "rule works in place: w -= ..., not w = w - ..."
    at = int(np.argmax(~np.isclose(ours, theirs, rtol=1e-9, atol=1e-12)))
    words = f"{asked} makes weight {at} {float(ours[at]):.9g}, expected {float(theirs[at]):.9g}"
    return words, "add decay to the gradient before you use the gradient" if decay else hint


def near(run: Comparison) -> Check:
    """Check that the weights of a run are those of zerosim's own optimizer, within rounding.

    The mean over all weights: another order of products rounds a gradient near 0 to the other side, and moves one
    weight by a whole step. A right rule that divides before it multiplies is 1e-6 away, a rate 1 % too high 8e-5.
    """
    ours, theirs = result_of(run.mine).weights, result_of(run.reference).weights
    largest = max(float(np.abs(values).max()) for values in theirs.values())
    gaps = np.concatenate([np.abs(ours[name] - values).ravel() for name, values in theirs.items()])
    gap = float(gaps.mean()) / largest
    expected = "weights that are on average within 1e-5 of the largest weight that zerosim's own rule gives"
    return Check("weights", gap < 1e-5, expected, f"off by {gap:.2g} of it on average")


# -- eight bits --------------------------------------------------------------------------------------
def blocks(seed: int) -> list[tuple[str, Any, Any]]:
    """Return blocks of values with each of two tables, and their names."""
    random = np.random.default_rng(5 + seed)
    signed = np.unique(np.concatenate([-(10.0 ** -np.linspace(0, 6, 127)), [0], 10.0 ** -np.linspace(0, 6, 128)]))
    blocks = {
        "normal values": random.standard_normal(256),
        "values of many sizes": random.standard_normal(256) * 10.0 ** random.uniform(-6, 2, 256),
        "one large value": np.concatenate([[50.0], np.full(255, -0.01)]),
        "one large negative value": np.concatenate([[-50.0], np.full(255, 0.01)]),
        "a last block of 40 values": random.standard_normal(40),
        "zeros": np.zeros(256),
    }
    tables = {"": signed.astype(np.float32), ", another table": np.linspace(-1, 1, 256, dtype=np.float32)}
    return [
        (f"a block of {name}{which}", block.astype(np.float32), table)
        for name, block in blocks.items()
        for which, table in tables.items()
    ]


def wrong_block(asked: str, values: Any, table: Any, pair: Any) -> Wrong | None:
    if wrong := wrong_codes(asked, values, pair, len(values), "scale", "one byte a value"):
        return wrong
    return wrong_nearest(asked, values, table, np.asarray(pair[0]), float(pair[1]), "the scale", _BELOW)


_BELOW = "searchsorted gives the entry above: is the entry below nearer?"


# -- bf16 --------------------------------------------------------------------------------------------
def rows(seed: int) -> list[tuple[str, Any, Any]]:
    """Return values, and 16 drawn bits for each."""
    random = np.random.default_rng(6 + seed)
    floats = (random.standard_normal(4000) * 10.0 ** random.uniform(-20, 20, 4000)).astype(np.float32)
    exact = (floats.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    cut = floats.view(np.uint32) & np.uint32(0xFFFF)
    rows = [
        ("values of bf16", exact, random.integers(0, 2**16, 4000)),
        ("0.0 and -0.0", np.array([0.0, -0.0], np.float32), np.array([0, 65535])),
        ("1 + 2**-9, drawn 0, 16383 and 16384", np.full(3, 1 + 2**-9, np.float32), np.array([0, 16383, 16384])),
        ("1 + 2**-8, drawn 32767 and 32768", np.full(2, 1 + 2**-8, np.float32), np.array([32767, 32768])),
        ("-3.01, drawn 0 and 65535", np.full(2, -3.01, np.float32), np.array([0, 65535])),
        ("values of many sizes", floats, random.integers(0, 2**16, 4000)),
        ("values of many sizes, drawn one less than is cut off", floats, np.maximum(cut, 1) - 1),
        ("values of many sizes, drawn what is cut off", floats, cut),
    ]
    return [(asked, values, drawn.astype(np.uint32)) for asked, values, drawn in rows]


def wrong_row(asked: str, values: Any, drawn: Any, came: Any) -> Wrong | None:
    """Return the error of a row: values round up if the drawn bits are less than the 16 that are cut off."""
    rounded = np.asarray(came)
    if rounded.dtype != np.float32 or rounded.shape != values.shape:
        return f"{asked}: {rounded.dtype} {rounded.shape}", "float32, whose lower 16 bits are 0"
    bits = values.view(np.uint32)
    right = (bits & np.uint32(0xFFFF0000)) + np.where(drawn < (bits & np.uint32(0xFFFF)), 65536, 0)
    bad = np.flatnonzero(rounded.view(np.uint32) != right.astype(np.uint32))
    if not bad.size:
        return None
    at = int(bad[0])
    expected = right.astype(np.uint32).view(np.float32)[at]
    words = f"{asked}: {values[at]!s} with {drawn[at]} drawn became {rounded[at]!s}, expected {expected!s}"
    return words, _AWAY if values[at] < 0 and rounded[at] > values[at] else _BITS


_AWAY = "up is away from 0: a negative value becomes smaller, where the draw is less than the bits cut off"
_BITS = "which 16 bits are cut off? The value rounds up exactly where the draw is less than these bits"
