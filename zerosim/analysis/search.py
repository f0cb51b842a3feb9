"""What would fit: the cheapest change of a configuration, or the largest value of one of its sizes.

Found by running, never by a formula: a `Trial` runs one configuration and says what it takes of a device. What a
trial runs is up to the caller (`train/plan.py`). Whatever is said to fit was run and fits; whatever is said not to fit
was run and does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import lcm
from typing import NamedTuple

from zerosim.analysis.formulas import STATES
from zerosim.config import OPTIONS, RunConfig
from zerosim.config.allocator import without_fragmentation
from zerosim.errors import InputError
from zerosim.placement.mesh import MODEL
from zerosim.units import format_bytes

MOST_RANKS = 64
Trial = Callable[[RunConfig], int]
"""The most that a rank takes from its device, in bytes; more than the room beside the reserve where it does not fit."""

LimitedTrial = Callable[[RunConfig, int], Mapping[str, int]]
"""Bytes by kind of the rank that takes most from devices of that capacity; more than the capacity where that is too
little."""


def no_reserve(config: RunConfig) -> int:
    """Nothing is kept for what is outside the program."""
    return 0


def cheapest_fit(config: RunConfig, capacity: int, trial: LimitedTrial) -> str | None:
    """The first change that fits, as flags and the peak it was measured with; None when none tried does."""
    return next(iter(cheapest_fits(config, capacity, trial, most=1)), None)


def cheapest_fits(
    config: RunConfig,
    capacity: int,
    trial: LimitedTrial,
    *,
    reserve: Callable[[RunConfig], int] = no_reserve,
    most: int = 3,
) -> list[str]:
    """The first changes that fit beside a reserve, in the order of their price, as flags and peaks. None of them does
    all that another does and more.

    More ranks, the last changes of all, are tried where nothing else fits. They make nothing smaller but model states:
    where the rest alone is too much for some number of ranks, no larger one is tried.
    """
    found: list[str] = []
    enough: list[set[str]] = []
    for changed, flags in changes(config):
        more_ranks, options = changed.mesh.ranks > config.mesh.ranks, set(flags.split()[::2])
        if len(found) == most or (found and more_ranks):
            break
        if any(fewer <= options for fewer in enough):
            continue
        kept = reserve(changed)
        room = capacity - kept
        by_kind = trial(changed, room)
        peak = sum(by_kind.values())
        if peak <= room:
            takes = "its peak is" if config.memory.allocator == "exact" else "the allocator takes"
            beside = f", beside {format_bytes(kept)} outside the program" if kept else ""
            found.append(f"{flags} would fit: {takes} {format_bytes(peak)} of {format_bytes(capacity)}{beside}")
            enough.append(options)
        elif more_ranks and peak - sum(by_kind.get(kind, 0) for kind in STATES) > room:
            break
    return found


def ever_more_recompute(config: RunConfig) -> tuple[str, ...]:
    """What the configuration runs again, then what runs more again. A list of parts is followed by whole blocks."""
    own = config.memory.recompute
    if not config.model.has_blocks or own == "full":
        return (own,)
    return ("none", "selective", "full") if own == "none" else (own, "full")


def leaner_losses(config: RunConfig) -> list[str]:
    """Loss modes that hold less of the logits than the configuration's own does, in the order of what they cost.

    `chunked` holds a second gradient of the head (V, D) where others hold logits (tokens, V): no gain for few tokens.
    """
    own, tokens = config.memory.loss, config.data.micro_batch * config.model.seq
    leaner = ["in-place"] if own not in ("in-place", "chunked") else []
    leaner += ["chunked"] if own != "chunked" and tokens > config.model.hidden else []
    return leaner if config.model.has_blocks else []


def changes(config: RunConfig) -> Iterator[tuple[RunConfig, str]]:
    """Configurations of the same model and the flags that lead there, in the order of what they cost.

    An allocator's knob against fragmentation, the logits' gradient written over them (another kernel, the same work),
    no prefetch (nothing but time), a higher stage (nothing but traffic), another attention kernel, a part of the logits
    at a time (the head again), running the attention core again, a smaller micro-batch with more accumulation (the same
    global batch, thinner matrices), running whole blocks again (a third more arithmetic), all of them, more ranks (more
    devices).
    """
    for changed in _changes(config):
        yield changed, _flags(config, changed)


def _flags(config: RunConfig, changed: RunConfig) -> str:
    """'--stage 3 --micro-batch 2': what is passed beside what was passed."""
    before, after = config.to_dict(), changed.to_dict()
    usual = ("allocator_conf", "prefetch", "prefetch_elements", "stage", "attention", "loss", "recompute")
    names = (*usual, "micro_batch", "accumulate", "ranks")
    return " ".join(f"--{name.replace('_', '-')} {after[name]}" for name in names if after[name] != before[name])


def _changes(config: RunConfig) -> Iterator[RunConfig]:
    more = ever_more_recompute(config)[1:]
    flash = config.memory.attention == "eager" and config.model.has_blocks
    leaner = leaner_losses(config)
    if (conf := without_fragmentation(config.memory.allocator, config.memory.allocator_conf)) is not None:
        yield config.replace(allocator_conf=conf)
    if "in-place" in leaner:
        yield config.replace(loss="in-place")
    if config.gathering.prefetch:
        yield config.replace(prefetch=0)
    if config.gathering.prefetch_elements:
        yield config.replace(prefetch_elements=0)
    higher: dict[int, RunConfig] = {}
    for stage in range(config.parallel.zero_stage + 1, 4):
        with suppress(InputError):  # a stage may not have what was given
            higher[stage] = config.replace(stage=stage)
    yield from higher.values()
    if flash:
        yield config.replace(attention="flash")
    if "chunked" in leaner:
        yield config.replace(loss="chunked")
    if "selective" in more:
        yield config.replace(recompute="selective")
    yield from _smaller(config)
    if "full" in more:
        yield config.replace(recompute="full")
    least, is_alone = config, True  # alone each was tried above
    extremes: dict[str, object] = {"stage": 3} if 3 in higher else {}
    extremes |= {"attention": "flash"} if flash else {}
    extremes |= {"loss": "chunked"} if "chunked" in leaner_losses(config.replace(micro_batch=1)) else {}
    extremes |= {"recompute": "full"} if "full" in more else {}
    for field, value in extremes.items():
        least = least.replace(**{field: value})
        if not is_alone:
            yield least
        is_alone = False
        yield from _smaller(least)
    ranks, at_once = 2 * config.mesh.ranks, config.mesh.axes.size(*MODEL)
    while ranks <= min(max(MOST_RANKS, 8 * config.mesh.ranks), _highest("ranks")):
        fewest = config.parallel.fewest_micro_batches(config.mesh.pp)
        accumulate = max(fewest, config.global_batch * at_once // ranks)
        yield least.replace(micro_batch=1, accumulate=accumulate, ranks=ranks)
        ranks *= 2


def _smaller(config: RunConfig) -> Iterator[RunConfig]:
    """Fewer rows at a time and as much more accumulation: every divisor of the micro-batch, largest first."""
    for rows in range(config.data.micro_batch - 1, 0, -1):
        if config.data.micro_batch % rows == 0:
            accumulate = config.data.accumulate * config.data.micro_batch // rows
            yield config.replace(micro_batch=rows, accumulate=accumulate)


class Tried(NamedTuple):
    """A value that was run, what a rank takes from its device, and what is kept beside it."""

    value: int
    peak_bytes: int
    reserve_bytes: int = 0

    @property
    def taken_bytes(self) -> int:
        """What the device has to have."""
        return self.peak_bytes + self.reserve_bytes


class Found(NamedTuple):
    """The value that fits best (None: none does), the next one, which does not, and all that were run. `whole_nodes`:
    of ranks, the fewest that fill nodes."""

    best: Tried | None
    beyond: Tried | None
    tried: tuple[Tried, ...]
    whole_nodes: Tried | None = None


SEARCHES = {
    "micro-batch": "the most rows per rank",
    "layers": "the most blocks of this width: the largest model",
    "params": "the most parameters of a flat model",
    "seq": "the longest rows",
    "ranks": "the fewest ranks",
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
    """The largest value of a field whose peak fits beside a reserve, by doubling and then halving the gap.

    Every value named was run; that more of it takes more memory is taken for granted in between.
    """
    return _search(config, field, capacity, trial, say, reserve, wanted=True)


def fewest_ranks(
    config: RunConfig,
    capacity: int,
    trial: Trial,
    say: Say = _silent,
    reserve: Callable[[RunConfig], int] = no_reserve,
) -> Found:
    """The smallest number of ranks whose peak fits beside a reserve. `beyond` is the one below it, which does not."""
    return _search(config, "ranks", capacity, trial, say, reserve, wanted=False)


def in_whole_nodes(
    config: RunConfig,
    found: Found,
    node: int,
    trial: Trial,
    say: Say = _silent,
    reserve: Callable[[RunConfig], int] = no_reserve,
) -> Found:
    """With the fewest ranks, from the best on, that the mesh divides and that fill nodes of so many GPUs."""
    if found.best is None:
        return found
    step = lcm(node, config.mesh.others.world_size)
    ranks = -(-found.best.value // step) * step
    if ranks == found.best.value or ranks > _highest("ranks"):
        return found._replace(whole_nodes=found.best if ranks == found.best.value else None)
    asked = with_value(config, "ranks", ranks)
    tried = Tried(ranks, trial(asked), reserve(asked))
    say(tried)
    return found._replace(whole_nodes=tried, tried=(*found.tried, tried))


def _search(
    config: RunConfig,
    field: str,
    capacity: int,
    trial: Trial,
    say: Say,
    reserve: Callable[[RunConfig], int],
    wanted: bool,
) -> Found:
    """The edge between values that fit and values that do not; `wanted` says which side small values are on."""
    tried: dict[int, Tried] = {}
    step, less = _steps(config, field)

    def fits(steps: int) -> bool:
        if steps not in tried:
            value = steps * step - less
            asked = with_value(config, field, value)
            tried[steps] = Tried(value, trial(asked), reserve(asked))
            say(tried[steps])
        return tried[steps].taken_bytes <= capacity

    least = 1 + -(-less // step)  # a chunk holds a layer at least, as
    if field == "layers":
        least = max(least, -(-(config.memory.again.every + less) // step))  # a K-th block is there
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
        best if best is not None and best.taken_bytes <= capacity else None,
        beyond if beyond is not None and beyond.taken_bytes > capacity else None,
        tuple(tried.values()),
    )


def _steps(config: RunConfig, field: str) -> tuple[int, int]:
    """A field's values are multiples of the first number, less the second: those that a mesh divides."""
    if field == "ranks":
        return config.mesh.others.world_size, 0
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
