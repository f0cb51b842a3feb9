"""What is asked of one cell, and the runs that answer it.

Owns the question (a run, and what a quantity takes beside it) and that a run which several cells ask for
is made once. Which numbers can be read is in `counts.py` and `closed_forms.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from zerosim.analysis.advice import run
from zerosim.analysis.search import most_that_fits
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.train.plan import plan
from zerosim.train.result import RunResult

SHAPES, TRAINING = "shapes", "training"


class Runs:
    """Runs that were made, so that tables that ask for the same one make it once."""

    def __init__(self) -> None:
        self._made: dict[tuple[RunConfig, str], RunResult] = {}
        self._largest: dict[tuple[RunConfig, int], int] = {}

    def result(self, config: RunConfig, counted_on: str) -> RunResult:
        """A step on shapes alone, or training for real numbers. Raises: what either raises."""
        if (config, counted_on) not in self._made:
            self._made[config, counted_on] = run(config) if counted_on == TRAINING else plan(config)
        return self._made[config, counted_on]

    def largest(self, config: RunConfig, memory: int) -> int:
        """Parameters of the largest flat model whose counted states fit so many bytes; 0 where none does."""

        def states(tried: RunConfig) -> int:
            return max(sum(rank.model_states().values()) for rank in plan(tried).memory)

        if (config, memory) not in self._largest:
            found = most_that_fits(config, "params", memory, states).best
            self._largest[config, memory] = found.value if found else 0
        return self._largest[config, memory]


@dataclass(frozen=True, slots=True)
class Asked:
    """One cell's question: a run, and what a quantity takes beside it."""

    config: RunConfig
    runs: Runs
    counted_on: str = SHAPES
    mp: int = 1
    at: str = "end_of_backward"
    memory: int = 0
    calculator: str = ""

    @property
    def result(self) -> RunResult:
        return self.runs.result(self.config, self.counted_on)


@dataclass(frozen=True, slots=True)
class Quantity:
    """How to read a number, what it is, its dimension, and which keys of [expect] it takes."""

    read: Callable[[Asked], Fraction | None]
    dimension: str
    what: str
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


def several_ranks(config: RunConfig) -> int:
    """N, for what is divided by N - 1. Raises: InputError for one rank."""
    if config.mesh.ranks == 1:
        raise InputError("ranks 1: one rank sends nothing, so its volume has no factor (N-1)/N; give two at least")
    if config.mesh.dp_replicate > 1:
        raise InputError(
            f"dp_replicate {config.mesh.dp_replicate}: a volume has two factors then, within and across replicas; "
            "expect sent_bytes"
        )
    return config.mesh.ranks
