"""What would fit: the cheapest change of a configuration, or the largest value of one of its sizes.

Found by running, never by a formula: a `Trial` runs one configuration and says what its peak is. What a
trial runs is up to the caller (`train/plan.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from zerosim.analysis.formulas import STATES
from zerosim.config import OPTIONS, RunConfig
from zerosim.errors import InputError
from zerosim.units import format_bytes

MOST_RANKS = 64
Trial = Callable[[RunConfig], int]
"""The highest peak over ranks, in bytes, of one step of a configuration on devices without a limit."""

LimitedTrial = Callable[[RunConfig, int], Mapping[str, int]]
"""Bytes by kind at the highest peak over ranks of one step or, where a rank asks for more than that capacity, then."""


def cheapest_fit(config: RunConfig, capacity: int, trial: LimitedTrial) -> str | None:
    """The first change that fits, as flags and the peak it was measured with; None when none tried does.

    More ranks, the last changes of all, make nothing smaller but model states: where the rest alone is too much for
    some number of ranks, no larger one is tried.
    """
    for changed, flags in changes(config):
        by_kind = trial(changed, capacity)
        peak = sum(by_kind.values())
        if peak <= capacity:
            return f"{flags} would fit: its peak is {format_bytes(peak)} of {format_bytes(capacity)}"
        if changed.mesh.ranks > config.mesh.ranks and peak - sum(by_kind.get(kind, 0) for kind in STATES) > capacity:
            return None
    return None


def changes(config: RunConfig) -> Iterator[tuple[RunConfig, str]]:
    """Configurations of the same model and the flags that lead there, in the order of what they cost.

    A higher stage (nothing but traffic), another attention kernel, running the attention core again, a
    smaller micro-batch with more accumulation (the same global batch, thinner matrices), running whole
    blocks again (a third more arithmetic), all of them, more ranks (more devices).
    """
    order = ("none", "selective", "full")
    more = order[order.index(config.memory.recompute) + 1 :] if config.model.has_blocks else ()
    for stage in range(config.parallel.zero_stage + 1, 4):
        yield config.replace(stage=stage), f"--stage {stage}"
    if config.memory.attention == "eager" and config.model.has_blocks:
        yield config.replace(attention="flash"), "--attention flash"
    if "selective" in more:
        yield config.replace(recompute="selective"), "--recompute selective"
    yield from _smaller(config)
    if "full" in more:
        yield config.replace(recompute="full"), "--recompute full"
    least, flags = config, ""
    extremes: dict[str, object] = {"stage": 3} if config.parallel.zero_stage < 3 else {}
    extremes |= {"recompute": "full"} if "full" in more else {}
    for field, value in extremes.items():
        least = least.replace(**{field: value})
        if flags:  # alone it was tried above
            yield least, f"{flags} --{field} {value}"
        flags = f"{flags} --{field} {value}".strip()
        for changed, words in _smaller(least):
            yield changed, f"{flags} {words}"
    ranks, at_once = 2 * config.mesh.ranks, config.mesh.tp * config.mesh.pp
    while ranks <= min(max(MOST_RANKS, 8 * config.mesh.ranks), _highest("ranks")):
        accumulate = max(1, config.global_batch * at_once // ranks)
        if config.parallel.pipeline == "interleaved":
            accumulate = max(1, accumulate // config.mesh.pp) * config.mesh.pp
        changed = least.replace(micro_batch=1, accumulate=accumulate, ranks=ranks)
        yield changed, f"{flags or '--stage 3'} --micro-batch 1 --accumulate {accumulate} --ranks {ranks}"
        ranks *= 2


def _smaller(config: RunConfig) -> Iterator[tuple[RunConfig, str]]:
    """Fewer rows at a time and as much more accumulation: every divisor of the micro-batch, largest first."""
    for rows in range(config.data.micro_batch - 1, 0, -1):
        if config.data.micro_batch % rows == 0:
            accumulate = config.data.accumulate * config.data.micro_batch // rows
            flags = f"--micro-batch {rows} --accumulate {accumulate}"
            yield config.replace(micro_batch=rows, accumulate=accumulate), flags


class Tried(NamedTuple):
    """A value that was run, and its peak."""

    value: int
    peak_bytes: int


class Found(NamedTuple):
    """The value that fits best (None: none does), the next one, which does not, and all that were run."""

    best: Tried | None
    beyond: Tried | None
    tried: tuple[Tried, ...]


SEARCHES = {
    "micro-batch": "the most rows per rank",
    "layers": "the most blocks of this width: the largest model",
    "params": "the most parameters of a flat model",
    "seq": "the longest rows",
    "ranks": "the fewest ranks",
    "mesh": "the cheapest meshes: tp, pp, ZeRO stage and recompute on the fewest ranks",
}


def most_that_fits(
    config: RunConfig, field: str, capacity: int, trial: Trial, say: Callable[[Tried], None] = lambda tried: None
) -> Found:
    """The largest value of a field whose peak fits, by doubling and then halving the gap.

    Every value named was run; that more of it takes more memory is taken for granted in between.
    """
    return _search(config, field, capacity, trial, say, wanted=True)


def fewest_ranks(
    config: RunConfig, capacity: int, trial: Trial, say: Callable[[Tried], None] = lambda tried: None
) -> Found:
    """The smallest number of ranks whose peak fits. `beyond` is the number below it, which does not."""
    return _search(config, "ranks", capacity, trial, say, wanted=False)


def _search(
    config: RunConfig, field: str, capacity: int, trial: Trial, say: Callable[[Tried], None], wanted: bool
) -> Found:
    """The edge between values that fit and values that do not; `wanted` says which side small values are on."""
    tried: dict[int, Tried] = {}
    step, less = _steps(config, field)

    def fits(steps: int) -> bool:
        if steps not in tried:
            value = steps * step - less
            tried[steps] = Tried(value, trial(with_value(config, field, value)))
            say(tried[steps])
        return tried[steps].peak_bytes <= capacity

    least = 1 + -(-less // step)  # a chunk holds a layer at least, as
    if field == "params":
        least = config.model.units or 1  # a unit holds a parameter
    low, high, most = least - 1, least, _highest(field) // step
    while fits(high) == wanted:
        low = high
        if high == most:
            break
        high = min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle) == wanted:
            low = middle
        else:
            high = middle
    inner, outer = (low, high) if wanted else (high, low)
    best, beyond = tried.get(inner), tried.get(outer)
    return Found(
        best if best is not None and best.peak_bytes <= capacity else None,
        beyond if beyond is not None and beyond.peak_bytes > capacity else None,
        tuple(tried.values()),
    )


def _steps(config: RunConfig, field: str) -> tuple[int, int]:
    """A field's values are multiples of the first number, less the second: those that a mesh divides."""
    if field == "ranks":
        return config.mesh.dp_replicate * config.mesh.tp * config.mesh.pp, 0
    if field == "layers" and config.mesh.pp > 1:
        return config.mesh.pp * config.parallel.num_chunks, 2 * config.parallel.balance_ends
    if field == "seq" and config.parallel.sequence_parallel:
        return config.mesh.tp, 0
    return 1, 0


def _highest(field: str) -> int:
    """The largest value that the field takes."""
    high = OPTIONS[field].high
    assert high is not None  # of every field that is searched
    return int(high)


def with_value(config: RunConfig, field: str, value: int) -> RunConfig:
    if field == "seq" and config.model.family == "gpt":  # the position table grows with the rows
        return config.replace(seq=value, positions=max(value, config.model.positions))
    return config.replace(**{field: value})


def check_search(config: RunConfig, what: str) -> str:
    """The field to search. Raises: InputError for a size that the model does not have."""
    if what not in SEARCHES:
        raise InputError(f"--find {what!r}: expected one of {', '.join(SEARCHES)}")
    field = what.replace("-", "_")
    if field == "layers" and config.parallel.stage_layers is not None:
        raise InputError(
            f"--find layers: --stage-layers {config.parallel.stage_layers} says how many there are; leave it out"
        )
    if field == "params" and config.model.family != "flat":
        raise InputError(f"--find params: {config.model.name} has fixed sizes; choose --model flat, or --find layers")
    if field in ("layers", "seq") and config.model.family == "flat":
        raise InputError(f"--find {what}: a flat model has none; choose --find params")
    return field
