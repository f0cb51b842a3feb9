"""Find the largest value of a field that fits on a device, by running on shapes alone.

A step's memory grows almost linearly with layers, rows and parameters. So two small runs predict the edge,
and runs on both sides of it confirm the edge. `analysis/search.py` assumes no line, and needs more runs.
"""

from __future__ import annotations

from collections.abc import Callable

from zerosim.config import OPTIONS, RunConfig
from zerosim.errors import OutOfMemory
from zerosim.train.plan import peak_of, peak_within, plan

SMALL = 8
SMALL_FLAT = 10**9
"""The line goes through the memory of this number of layers, rows or flat parameters, and of twice that number."""


def fits(config: RunConfig, memory: int) -> bool:
    """Return whether one step needs at most that many bytes on every rank."""
    try:
        return sum(peak_within(config, memory).values()) <= memory
    except OutOfMemory:  # another memory is too small
        return False


def largest_that_fits(config: RunConfig, field: str, memory: int) -> int:
    """Return the largest value of `layers` or `micro_batch` with which a step fits; 0 if none fits. The next larger
    value was run, and does not fit."""

    def with_value(value: int) -> RunConfig:
        return config.replace(**{field: value})

    guess = _guess(lambda value: peak_of(with_value(value)), field, SMALL, memory)
    return edge(lambda value: fits(with_value(value), memory), guess)


def largest_states(config: RunConfig, memory: int) -> int:
    """Return the parameters of the largest flat model whose counted states are at most that many bytes on every rank; 0
    if there is none."""

    def states(params: int) -> int:
        return max(sum(rank.model_states().values()) for rank in plan(config.replace(params=params)).memory)

    guess = _guess(states, "params", SMALL_FLAT, memory)
    return edge(lambda params: states(params) <= memory, guess)


def _guess(nbytes: Callable[[int], int], field: str, small: int, memory: int) -> int:
    """Return where the line through two small values reaches the memory, or the field's highest value."""
    at_small, at_twice, high = nbytes(small), nbytes(2 * small), OPTIONS[field].high
    assert high is not None  # for every searched field
    return min(small + small * (memory - at_small) // max(1, at_twice - at_small), int(high))


def edge(is_inside: Callable[[int], bool], guess: int) -> int:
    """Return the largest whole number from 1 on that is inside, with all numbers below it; 0 if 1 is outside. Search
    from a guess outward in doubling steps, then by bisection."""
    low, high, value, step = 0, 0, max(1, guess), 1
    while not high or high - low > 1:
        if is_inside(value):
            low = value
        else:
            high = value
        if low and high:
            value = (low + high) // 2
        else:
            value, step = max(1, low + step if low else high - step), 2 * step
    return low
