"""Find what would fit: the cheapest change of a configuration, or the largest value of one of its sizes.

The search runs configurations and uses no formula. A `Trial` runs one configuration and returns its device memory. The
caller decides what a trial runs (`train/plan.py`). Every answer "fits" or "does not fit" comes from such a
run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from math import lcm
from typing import NamedTuple

from zerosim.analysis.formulas import STATES
from zerosim.analysis.offload_ways import offloads, other_memories
from zerosim.config import OPTIONS, RunConfig
from zerosim.config.allocator import without_fragmentation
from zerosim.errors import InputError, OutOfMemory
from zerosim.placement.mesh import MODEL
from zerosim.units import format_bytes

MOST_RANKS = 64
Trial = Callable[[RunConfig], int]
"""The peak bytes on a rank's device; more than the room beside the reserve if the run does not fit. Raises: OutOfMemory
if another memory is too small."""

LimitedTrial = Callable[[RunConfig, int], Mapping[str, int]]
"""Bytes by kind of the fullest rank, on devices of that capacity; more than the capacity if that is too
small. Raises: OutOfMemory if another memory is too small."""


def no_reserve(config: RunConfig) -> int:
    """Reserve no memory for CUDA and its libraries."""
    return 0


def cheapest_fit(config: RunConfig, capacity: int, trial: LimitedTrial) -> str | None:
    """Return the first change that fits, as flags and its counted peak; None if no tried change fits. Offload is tried
    if the configuration has a memory for it."""
    return next(iter(cheapest_fits(config, capacity, trial, most=1, memories=other_memories(config))), None)


def cheapest_fits(
    config: RunConfig,
    capacity: int,
    trial: LimitedTrial,
    *,
    reserve: Callable[[RunConfig], int] = no_reserve,
    most: int = 3,
    memories: Collection[str] = (),
) -> list[str]:
    """Return the first changes that fit beside a reserve, cheapest first, as flags and peaks. No change contains
    another one. `memories` are those beside the device's (`other_memories`).


    More ranks come last, and only if nothing else fits. They shrink model states only:
    if the rest alone is too large with some number of ranks, no larger number is tried.
    """
    found: list[str] = []
    enough: list[set[str]] = []
    for changed, flags in changes(config, memories):
        more_ranks, options = changed.mesh.ranks > config.mesh.ranks, set(flags.split()[::2])
        if len(found) == most or (found and more_ranks):
            break
        if any(fewer <= options for fewer in enough):
            continue
        kept = reserve(changed)
        room = capacity - kept
        try:
            by_kind = trial(changed, room)
        except OutOfMemory:  # of its node's host, or of the drives
            continue
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
    """Return the configuration's recompute, then settings that recompute more. Whole blocks follow a list of parts."""
    own = config.memory.recompute
    if not config.model.has_blocks or own == "full":
        return (own,)
    return ("none", "selective", "full") if own == "none" else (own, "full")


def leaner_losses(config: RunConfig) -> list[str]:
    """Return loss modes that hold less of the logits than the configuration's own, cheapest first.

    `chunked` holds a second gradient of the head (V, D) where others hold logits (tokens, V): no gain for few tokens.
    """
    own, tokens = config.memory.loss, config.data.micro_batch * config.model.seq
    leaner = ["in-place"] if own not in ("in-place", "chunked") else []
    leaner += ["chunked"] if own != "chunked" and tokens > config.model.hidden else []
    return leaner if config.model.has_blocks else []


def changes(config: RunConfig, memories: Collection[str] = ()) -> Iterator[tuple[RunConfig, str]]:
    """Yield configurations of the same model and the flags that lead there, cheapest first.

    These are: an allocator's setting against fragmentation, the logits' gradient written over the logits (another
    kernel, the same work), no prefetch (costs only time), a higher ZeRO stage (costs only traffic), another attention
    kernel, the logits in chunks (runs the head again), recomputing the attention core, a smaller microbatch with more
    accumulation (the same global batch, smaller matrices), recomputing whole blocks (a third more arithmetic), all of
    them, model states in other `memories` (the CPU's step, and copies), these and all of the others, and more ranks
    (more devices).
    """
    for changed in _changes(config, memories):
        yield changed, _flags(config, changed)


def _flags(config: RunConfig, changed: RunConfig) -> str:
    """Return the added flags, such as '--stage 3 --micro-batch 2'."""
    before, after = config.to_dict(), changed.to_dict()
    usual = ("allocator_conf", "prefetch", "prefetch_elements", "stage", "offload", "attention", "loss", "recompute")
    names = (*usual, "micro_batch", "accumulate", "ranks")
    return " ".join(f"--{name.replace('_', '-')} {after[name]}" for name in names if after[name] != before[name])


def _changes(config: RunConfig, memories: Collection[str]) -> Iterator[RunConfig]:
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
        with suppress(InputError):  # a ZeRO stage may lack a given option
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
    yield from offloads(config, memories)
    if least != config:
        yield from offloads([least, *_smaller(least)][-1], memories)
    ranks, at_once = 2 * config.mesh.ranks, config.mesh.axes.size(*MODEL)
    while ranks <= min(max(MOST_RANKS, 8 * config.mesh.ranks), _highest("ranks")):
        fewest = config.parallel.fewest_micro_batches(config.mesh.pp)
        accumulate = max(fewest, config.global_batch * at_once // ranks)
        yield least.replace(micro_batch=1, accumulate=accumulate, ranks=ranks)
        ranks *= 2


def _smaller(config: RunConfig) -> Iterator[RunConfig]:
    """Yield smaller microbatches with more accumulation: every divisor of the microbatch, largest first."""
    for rows in range(config.data.micro_batch - 1, 0, -1):
        if config.data.micro_batch % rows == 0:
            accumulate = config.data.accumulate * config.data.micro_batch // rows
            yield config.replace(micro_batch=rows, accumulate=accumulate)


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
    `whole_nodes`: for ranks, the fewest that fill nodes."""

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
    ranks = -(-found.best.value // step) * step
    if ranks == found.best.value or ranks > _highest("ranks"):
        return found._replace(whole_nodes=found.best if ranks == found.best.value else None)
    asked = with_value(config, "ranks", ranks)
    tried = _tried(ranks, asked, trial, reserve)
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
    """Find the edge between values that fit and values that do not; `wanted` says on which side small values are."""
    tried: dict[int, Tried] = {}
    step, less = _steps(config, field)

    def fits(steps: int) -> bool:
        if steps not in tried:
            value = steps * step - less
            asked = with_value(config, field, value)
            tried[steps] = _tried(value, asked, trial, reserve)
            say(tried[steps])
        return tried[steps].fits(capacity)

    least = 1 + -(-less // step)  # a chunk holds at least one layer, as
    if field == "layers":
        least = max(least, -(-(config.memory.again.every + less) // step))  # there is a K-th block
    if field == "params":
        least = config.model.units or 1  # a unit holds at least one parameter
    highest = config.model.hidden if field == "lora_rank" else _highest(field)
    low, high, most = least - 1, least, highest // step
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
        best if best is not None and best.fits(capacity) else None,
        beyond if beyond is not None and not beyond.fits(capacity) else None,
        tuple(tried.values()),
    )


def _tried(value: int, asked: RunConfig, trial: Trial, reserve: Callable[[RunConfig], int]) -> Tried:
    try:
        return Tried(value, trial(asked), reserve(asked))
    except OutOfMemory as error:
        return Tried(value, 0, reserve(asked), error.memory)


def _steps(config: RunConfig, field: str) -> tuple[int, int]:
    """Return two numbers: a field's values are multiples of the first minus the second, so that a mesh divides them."""
    if field == "ranks":
        return config.mesh.others.world_size, 0
    if field == "layers" and config.mesh.pp > 1:
        return config.mesh.pp * config.parallel.num_chunks, 2 * config.parallel.balance_ends
    if field == "seq" and config.parallel.sequence_parallel:
        return config.mesh.tp, 0
    return 1, 0


def _highest(field: str) -> int:
    """Return the largest value that the field accepts."""
    high = OPTIONS[field].high
    assert high is not None  # for every searched field
    return int(high)


def with_value(config: RunConfig, field: str, value: int) -> RunConfig:
    if field == "seq" and config.model.family == "gpt":  # the position table grows with the rows
        return config.replace(seq=value, positions=max(value, config.model.positions))
    return config.replace(**{field: value})


def check_search(config: RunConfig, what: str) -> str:
    """Return the field to search. Raises: InputError for a size that the model does not have."""
    if what not in SEARCHES:
        raise InputError(f"--find {what!r}: expected one of {', '.join(SEARCHES)}")
    field = what.replace("-", "_")
    if field == "layers" and config.parallel.stage_layers is not None:
        raise InputError(
            f"--find layers: --stage-layers {config.parallel.stage_layers} already sets the number of layers; leave "
            "it out"
        )
    if field == "params" and config.model.family != "flat":
        raise InputError(f"--find params: {config.model.name} has fixed sizes; choose --model flat, or --find layers")
    if field in ("layers", "seq") and config.model.family == "flat":
        raise InputError(f"--find {what}: a flat model has no such size; choose --find params")
    return field
