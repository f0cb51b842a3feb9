"""Find what would fit: the cheapest changes (`cheapest.py`), the largest value of a size, or the fewest ranks.

The search runs configurations and uses no formula. A `Trial` runs one configuration and returns its device memory. The
caller decides what a trial runs (`train/plan.py`). Every answer "fits" or "does not fit" comes from such a
run.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import NamedTuple

from zerosim.analysis.candidate import REACH, Candidate, candidate
from zerosim.analysis.capabilities import pipeline, tensor
from zerosim.analysis.cheapest import MOST_RANKS as MOST_RANKS
from zerosim.analysis.cheapest import changes as changes
from zerosim.analysis.cheapest import cheapest_fit as cheapest_fit
from zerosim.analysis.cheapest import cheapest_fits as cheapest_fits
from zerosim.analysis.cheapest import no_reserve
from zerosim.analysis.recompute import period_of
from zerosim.config import OPTIONS, RunConfig
from zerosim.config.parts.context import cut_of
from zerosim.errors import InputError, OutOfMemory

Trial = Callable[[RunConfig], int]
"""The peak bytes on a rank's device; more than the room beside the reserve if the run does not fit. Raises: OutOfMemory
if another memory is too small, InputError if the configuration cannot be planned."""


class Tried(NamedTuple):
    """A tried value, the peak bytes on a rank's device, and the reserve beside them. `too_small`: the other memory that
    ended the run, 'host' or 'nvme'; then the device's bytes are unknown."""

    value: int
    peak_bytes: int
    reserve_bytes: int = 0
    too_small: str = ""

    @property
    def taken_bytes(self) -> int:
        """The bytes that the device must have."""
        return self.peak_bytes + self.reserve_bytes

    def fits(self, capacity: int) -> bool:
        return not self.too_small and self.taken_bytes <= capacity


class Found(NamedTuple):
    """The best value that fits (None: none does), the next one, which does not fit, and all tried values.
    `whole_nodes`: for ranks, the fewest that fill nodes. `refusal`: why no value beyond the best could be tried, if
    other options refuse the larger ones."""

    best: Tried | None
    beyond: Tried | None
    tried: tuple[Tried, ...]
    whole_nodes: Tried | None = None
    refusal: str = ""


SEARCHES = {
    "micro-batch": "the most rows per rank",
    "layers": "the most blocks of this width: the largest model",
    "params": "the most parameters of a flat model",
    "seq": "the longest rows",
    "ranks": "the fewest ranks",
    "lora-rank": "the highest rank of adapters",
    "model": "the largest model that has a name",
    "offload": "whether to offload, and what: every way of --stage (default 3), by modelled time with --gpu",
    "mesh": "the best meshes, ZeRO stages, microbatches, recompute and schedules of --ranks ranks, or of the fewest "
    "that fit: by modelled tokens/s with --gpu, else by memory",
}


Say = Callable[[Tried], None]


def _silent(tried: Tried) -> None:
    pass


def most_that_fits(
    config: RunConfig,
    field: str,
    capacity: int,
    trial: Trial,
    say: Say = _silent,
    reserve: Callable[[RunConfig], int] = no_reserve,
) -> Found:
    """Find the largest value of a field whose peak fits beside a reserve, by doubling and then halving the gap.

    Every reported value was run. In between the search assumes that larger values take more memory.
    """
    return _search(config, field, capacity, trial, say, reserve, wanted=True)


def fewest_ranks(
    config: RunConfig,
    capacity: int,
    trial: Trial,
    say: Say = _silent,
    reserve: Callable[[RunConfig], int] = no_reserve,
) -> Found:
    """Find the smallest number of ranks whose peak fits beside a reserve. `beyond` is the number below it, which does
    not fit."""
    return _search(config, "ranks", capacity, trial, say, reserve, wanted=False)


def in_whole_nodes(
    config: RunConfig,
    found: Found,
    node: int,
    trial: Trial,
    say: Say = _silent,
    reserve: Callable[[RunConfig], int] = no_reserve,
) -> Found:
    """Add the fewest ranks, from the best on, that the mesh divides and that fill nodes of that many GPUs."""
    if found.best is None:
        return found
    step = lcm(node, config.mesh.others.world_size)
    first = -(-found.best.value // step) * step
    if first == found.best.value:
        return found._replace(whole_nodes=found.best)
    for ranks in range(first, min(first + REACH * step, _highest("ranks")) + 1, step):
        if isinstance(tried := _tried(config, "ranks", ranks, trial, reserve), Tried):
            say(tried)
            return found._replace(whole_nodes=tried, tried=(*found.tried, tried))
    return found


def _search(
    config: RunConfig,
    field: str,
    capacity: int,
    trial: Trial,
    say: Say,
    reserve: Callable[[RunConfig], int],
    wanted: bool,
) -> Found:
    """Find the edge between values that fit and values that do not; `wanted` says on which side small values are.
    In place of a refused value its nearest neighbour is tried."""
    tried: dict[int, Tried | InputError] = {}
    step, less = _steps(config, field)

    def at(steps: int) -> Tried | None:
        if steps not in tried:
            tried[steps] = _tried(config, field, steps * step - less, trial, reserve)
            if isinstance(found := tried[steps], Tried):
                say(found)
        return found if isinstance(found := tried[steps], Tried) else None

    def near(steps: int, low: int, high: int) -> int | None:
        """Return the nearest number between `low` and `high`, neither of them, that is not refused."""
        for distance in range(REACH):
            for one in (steps - distance, steps + distance):
                if low < one < high and at(one) is not None:
                    return one
        return None

    def fits(steps: int) -> bool:
        one = at(steps)
        return one is not None and one.fits(capacity)

    least, most = _least(config, field, step, less), _highest(field) // step
    own = (config.value(field) + less) // step
    low, high = least - 1, near(least, least - 1, most + 1) or own
    if at(high) is None and isinstance(error := tried[high], InputError):
        raise error  # even the given value is refused
    while fits(high) == wanted:
        low = high
        if low == most:
            break
        high = min(2 * low, most)
        doubled = (min(low * 2**power, most) for power in range(1, (most // low).bit_length() + 1))
        if (found := next((steps for steps in doubled if at(steps) is not None), None)) is None:
            break  # the edge lies below the first refused value
        high = found
    while high - low > 1:
        if (middle := near((low + high) // 2, low, high)) is not None and fits(middle) == wanted:
            low = middle
        elif middle is None and at(high) is not None:
            break  # nothing between them can be tried
        else:
            high = (low + high) // 2 if middle is None else middle
    inner, outer = (low, high) if wanted else (high, low)
    best, beyond = (at(steps) if steps in tried else None for steps in (inner, outer))
    ran = [one for one in tried.values() if isinstance(one, Tried)]
    refused = [one for steps, one in sorted(tried.items()) if isinstance(one, InputError) and steps > inner]
    return Found(
        best if best is not None and best.fits(capacity) else None,
        beyond if beyond is not None and not beyond.fits(capacity) else None,
        tuple(ran),
        refusal=str(refused[0].called(f"--{field.replace('_', '-')}")) if refused else "",
    )


def _tried(
    config: RunConfig, field: str, value: int, trial: Trial, reserve: Callable[[RunConfig], int]
) -> Tried | InputError:
    """Try a value. Return the refusal if other options do not go with it."""
    if (asked := with_value(config, field, value)).config is None:
        return InputError(asked.why_not, field=asked.field)
    try:
        return Tried(value, trial(asked.config), reserve(asked.config))
    except OutOfMemory as error:
        return Tried(value, 0, reserve(asked.config), error.memory)
    except InputError as error:
        return error


def _least(config: RunConfig, field: str, step: int, less: int) -> int:
    """Return the smallest number of steps that may be possible."""
    least = 1 + -(-less // step)  # a chunk holds at least one layer, as
    if field == "layers":
        return max(least, -(-(period_of(config) + less) // step))  # there is a K-th block
    return config.model.units or 1 if field == "params" else least  # a unit holds at least one parameter


def _steps(config: RunConfig, field: str) -> tuple[int, int]:
    """Return two numbers: a field's values are multiples of the first minus the second, so that a mesh divides them."""
    if field == "ranks":
        return config.mesh.others.world_size, 0
    if field == "layers":
        return pipeline.layer_steps(config)
    if field == "seq":
        shares = config.mesh.tp if tensor.divides_rows(config) else 1
        return cut_of(config.mesh, config.context).multiple * shares, 0
    return 1, 0


def _highest(field: str) -> int:
    """Return the largest value that the field accepts."""
    high = OPTIONS[field].high
    assert high is not None  # for every searched field
    return int(high)


def with_value(config: RunConfig, field: str, value: int) -> Candidate:
    """Return the configuration with another value of the searched field."""
    if field == "seq" and config.model.has_position_table:  # the position table grows with the rows
        return candidate(config, seq=value, positions=max(value, config.model.positions))
    return candidate(config, **{field: value})


def check_search(config: RunConfig, what: str) -> str:
    """Return the field to search. Raises: InputError for a size that the model does not have."""
    if what not in SEARCHES:
        raise InputError(f"--find {what!r}: expected one of {', '.join(SEARCHES)}")
    field = what.replace("-", "_")
    if field == "layers":
        pipeline.check_layers(config)
    if field == "params" and config.model.family != "flat":
        raise InputError(f"--find params: {config.model.name} has fixed sizes; choose --model flat, or --find layers")
    if field in ("layers", "seq") and config.model.family == "flat":
        raise InputError(f"--find {what}: a flat model has no such size; choose --find params")
    return field
