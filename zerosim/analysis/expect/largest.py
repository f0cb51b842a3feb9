"""The largest value of a field that fits on a device, found by running on shapes alone.

What a step takes grows with layers, rows and parameters nearly in a line. So two small runs say where the edge should
be, and runs on both sides of it say where it is. `analysis/search.py` takes nothing for granted, and more runs.
"""

from __future__ import annotations

from collections.abc import Callable

from zerosim.config import OPTIONS, RunConfig
from zerosim.train.plan import peak_of, peak_within, plan

SMALL = 8
SMALL_FLAT = 10**9
"""The line goes through what so many layers or rows take, or a flat model's parameters, and twice as many."""


def fits(config: RunConfig, memory: int) -> bool:
    """Whether one step asks for no more than so many bytes on any rank."""
    return sum(peak_within(config, memory).values()) <= memory


def largest_that_fits(config: RunConfig, field: str, memory: int) -> int:
    """The largest value of `layers` or `micro_batch` with which a step fits; 0 where none does. The next larger one was
    run, and does not fit."""

    def with_value(value: int) -> RunConfig:
        return config.replace(**{field: value})

    guess = _guess(lambda value: peak_of(with_value(value)), field, SMALL, memory)
    return edge(lambda value: fits(with_value(value), memory), guess)


def largest_states(config: RunConfig, memory: int) -> int:
    """Parameters of the largest flat model whose counted states are no more than so many bytes on any rank; 0 where
    none is."""

    def states(params: int) -> int:
        return max(sum(rank.model_states().values()) for rank in plan(config.replace(params=params)).memory)

    guess = _guess(states, "params", SMALL_FLAT, memory)
    return edge(lambda params: states(params) <= memory, guess)


def _guess(nbytes: Callable[[int], int], field: str, small: int, memory: int) -> int:
    """Where the line through two small values reaches the memory, or the highest value that the field may have."""
    at_small, at_twice, high = nbytes(small), nbytes(2 * small), OPTIONS[field].high
    assert high is not None  # of every field that is searched
    return min(small + small * (memory - at_small) // max(1, at_twice - at_small), int(high))


def edge(is_inside: Callable[[int], bool], guess: int) -> int:
    """The largest whole number from 1 on that is inside, with all below it; 0 where 1 is not. From a guess outward in
    steps that double, then by halves."""
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
