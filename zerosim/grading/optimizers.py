"""The exercises on optimizers: element-wise rules, and what is stored in few bits.

A rule is asked by itself first: steps are compared with the formula in float64, slices with the whole, to the bit. Then
it trains, and comes as far as zerosim's own. The two functions on bits are asked only. Sources: Duchi et al. (2011),
Liu et al. (1908.03265), Dettmers et al. (2110.02861), beside PyTorch, bitsandbytes and torchao.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from zerosim.errors import InputError
from zerosim.grading.adapting import examined, function_of, name_of
from zerosim.grading.exercise import Check, Comparison
from zerosim.grading.limits import Failure, Watch, called
from zerosim.grading.own_code import text_of
from zerosim.grading.trial import Own, result_of
from zerosim.optim.elementwise import Elementwise, Now

EPS, BETA1, BETA2, LR, DECAY = 1e-8, 0.9, 0.999, 0.1, 0.01
Formula = Callable[[Any, Any, int, list[Any]], Any]
"""A step in float64: the new weights of w, g, t and the states, which are moved in place."""


def rule(answer: Any) -> Own:
    """A run with an optimizer of the class handed in. Raises: InputError for anything else."""
    if not (inspect.isclass(answer) and issubclass(answer, Elementwise)):
        raise InputError(f"{name_of(answer)} has no rule: hand in the class itself, such as class Mine(Elementwise)")
    made: type[Elementwise] = answer
    return Own(optimizer=made())


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


def examine_rule(formula: Formula, names: tuple[str, ...], hint: str) -> Callable[[Any, Watch], Any]:
    """Twelve steps, with decay and without, against `formula`; then slices against the whole."""

    def examine(answer: Any, watch: Watch) -> tuple[Check, ...] | Failure:
        asked = "rule"

        def first_wrong() -> tuple[str, str] | None:
            nonlocal asked
            mine = answer()
            if tuple(mine.states) != names:
                return f"states is {text_of(mine.states, repr)}, expected {names}", "their names, in this order"
            for decay in (0.0, DECAY):
                ours, theirs = _start(len(names)), _start(len(names))
                for t in range(1, 13):
                    asked = f"step {t}" + (f" with weight decay {decay:g}" if decay else "")
                    g = _gradient(t)
                    mine.rule(np, ours[0], g.copy(), Now(LR, t, decay), *ours[1:])
                    theirs[0] = formula(theirs[0], g + decay * theirs[0], t, theirs[1:])
                    if not np.allclose(ours[0], theirs[0], rtol=1e-9, atol=1e-12):
                        return _likeness(asked, t, ours[0], theirs[0], decay, hint)
            whole, parts = _start(len(names)), _start(len(names))
            for t in range(1, 9):
                asked = f"step {t} on slices"
                mine.rule(np, whole[0], _gradient(t), Now(LR, t, DECAY), *whole[1:])
                for start, stop in pairwise((0, 7, 32, 33, 64)):
                    each = [array[start:stop] for array in parts]
                    mine.rule(np, each[0], _gradient(t)[start:stop], Now(LR, t, DECAY), *each[1:])
                if not np.array_equal(whole[0], parts[0]):
                    return f"{asked} is not the whole's slice", "a weight's step may depend on no other weight"
            return None

        came = called(first_wrong, watch, lambda: asked)
        expected = "the formula's steps, with decay and without, and a slice's bits those of the whole"
        return examined("steps", expected, "12 steps, 8 on 4 slices", came, lambda: asked)

    return examine


def _start(num_states: int) -> list[Any]:
    """Weights, and states of zeros, in float64."""
    return [np.random.default_rng(0).standard_normal(64), *(np.zeros(64) for _ in range(num_states))]


def _gradient(t: int) -> Any:
    return np.random.default_rng(t).standard_normal(64)


def _likeness(asked: str, t: int, ours: Any, theirs: Any, decay: float, hint: str) -> tuple[str, str]:
    if t == 1 and np.array_equal(ours, _start(0)[0]):
        return f"{asked} leaves the weights as they were", "rule works in place: w -= ..., not w = w - ..."
    at = int(np.argmax(~np.isclose(ours, theirs, rtol=1e-9, atol=1e-12)))
    words = f"{asked} makes weight {at} {float(ours[at]):.9g}, expected {float(theirs[at]):.9g}"
    return words, "decay is added to the gradient first: g += now.weight_decay * w" if decay else hint


def near(run: Comparison) -> Check:
    """The weights of a run are those of zerosim's own optimizer but for rounding."""
    ours, theirs = result_of(run.mine).weights, result_of(run.reference).weights
    largest = max(float(np.abs(values).max()) for values in theirs.values())
    gap = max(float(np.abs(ours[name] - values).max()) for name, values in theirs.items()) / largest
    expected = "weights within 1e-4 of the largest of those that zerosim's own rule gives"
    return Check("weights", gap < 1e-4, expected, f"at most {gap:.2g} of it away")


# -- eight bits --------------------------------------------------------------------------------------
def quantiser(answer: Any) -> Own:
    """Raises: InputError for anything but a function."""
    function_of(answer, "my_quantiser(values, table)")
    return Own()


def examine_quantiser(answer: Any, watch: Watch) -> tuple[Check, ...] | Failure:
    """Blocks of 256 values: their codes are the nearest entries of tables, times the largest magnitude."""
    ask, random, asked = function_of(answer, "my_quantiser(values, table)"), np.random.default_rng(5), ""
    signed = np.unique(np.concatenate([-(10.0 ** -np.linspace(0, 6, 127)), [0], 10.0 ** -np.linspace(0, 6, 128)]))
    blocks = {
        "normal values": random.standard_normal(256),
        "values of many sizes": random.standard_normal(256) * 10.0 ** random.uniform(-6, 2, 256),
        "one large value": np.concatenate([[-50.0], np.full(255, 0.01)]),
        "a last block of 40 values": random.standard_normal(40),
        "zeros": np.zeros(256),
    }
    tables = {"": signed.astype(np.float32), ", another table": np.linspace(-1, 1, 256, dtype=np.float32)}

    def first_wrong() -> tuple[str, str] | None:
        nonlocal asked
        for name, block in blocks.items():
            for which, table in tables.items():
                asked = f"a block of {name}{which}"
                values = block.astype(np.float32)
                came = ask(values.copy(), table.copy())
                if not (isinstance(came, tuple) and len(came) == 2):
                    return f"{asked} gave {text_of(came, repr)[:80]}", "return codes, scale"
                codes, scale = np.asarray(came[0]), float(came[1])
                if codes.dtype != np.uint8 or codes.shape != values.shape:
                    return f"{asked}: codes of {codes.dtype} {codes.shape}", "one byte a value: dtype uint8"
                if not math.isfinite(scale) or scale != float(np.abs(values).max()):
                    words = f"{asked}: the scale is {scale:.9g}, expected {float(np.abs(values).max()):.9g}"
                    return words, "the largest magnitude of the block"
                if wrong := _wrong_code(asked, values, table, codes, scale):
                    return wrong
        return None

    came = called(first_wrong, watch, lambda: asked)
    expected = "the largest magnitude of a block, and the nearest entry of the table for each value over it"
    return examined("codes", expected, f"{len(blocks) * len(tables)} blocks", came, lambda: asked)


def _wrong_code(asked: str, values: Any, table: Any, codes: Any, scale: float) -> tuple[str, str] | None:
    """The first value whose entry is further away than another one, by more than rounding."""
    unit = values.astype(np.float64) / (scale or 1.0)
    gaps = np.abs(unit[:, None] - table[None, :].astype(np.float64))
    mine, best = gaps[np.arange(len(codes)), codes], gaps.min(axis=1)
    bad = np.flatnonzero(mine > best + 1e-7 * np.abs(unit))
    if not bad.size:
        return None
    at = int(bad[0])
    words = f"{asked}: value {unit[at]:.4g} of the scale became {table[codes[at]]:.4g}, nearest is "
    return words + f"{table[gaps[at].argmin()]:.4g}", "searchsorted gives the entry above: is the one below nearer?"


# -- bf16 --------------------------------------------------------------------------------------------
def rounding(answer: Any) -> Own:
    """Raises: InputError for anything but a function."""
    function_of(answer, "my_rounding(values, drawn)")
    return Own()


def examine_rounding(answer: Any, watch: Watch) -> tuple[Check, ...] | Failure:
    """Values, and 16 bits drawn for each: up where they are less than the 16 bits that are cut off."""
    ask, random, asked = function_of(answer, "my_rounding(values, drawn)"), np.random.default_rng(6), ""
    floats = (random.standard_normal(4000) * 10.0 ** random.uniform(-20, 20, 4000)).astype(np.float32)
    exact = (floats.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    rows = {
        "values of bf16": (exact, random.integers(0, 2**16, 4000)),
        "0.0 and -0.0": (np.array([0.0, -0.0], np.float32), np.array([0, 65535])),
        "1 + 2**-9, drawn 0, 16383 and 16384": (np.full(3, 1 + 2**-9, np.float32), np.array([0, 16383, 16384])),
        "1 + 2**-8, drawn 32767 and 32768": (np.full(2, 1 + 2**-8, np.float32), np.array([32767, 32768])),
        "-3.01, drawn 0 and 65535": (np.full(2, -3.01, np.float32), np.array([0, 65535])),
        "values of many sizes": (floats, random.integers(0, 2**16, 4000)),
    }

    def first_wrong() -> tuple[str, str] | None:
        nonlocal asked
        for name, (values, drawn) in rows.items():
            asked = name
            came = np.asarray(ask(values.copy(), drawn.astype(np.uint32)))
            if came.dtype != np.float32 or came.shape != values.shape:
                return f"{asked}: {came.dtype} {came.shape}", "float32, whose lower 16 bits are 0"
            bits = values.view(np.uint32)
            right = (bits & np.uint32(0xFFFF0000)) + np.where(drawn < (bits & np.uint32(0xFFFF)), 65536, 0)
            bad = np.flatnonzero(came.view(np.uint32) != right.astype(np.uint32))
            if bad.size:
                at = int(bad[0])
                expected = right.astype(np.uint32).view(np.float32)[at]
                words = f"{asked}: {values[at]!s} with {drawn[at]} drawn became {came[at]!s}, expected {expected!s}"
                return words, "cut off the lower 16 bits; add 0x10000 where what was drawn is less than they were"
        return None

    came = called(first_wrong, watch, lambda: asked)
    return examined("bits", "bf16, up as often as a value is near to it", f"{len(rows)} rows", came, lambda: asked)
