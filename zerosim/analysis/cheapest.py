"""Find the cheapest changes of a configuration that fit on a device that is too small for it.

The search runs configurations and uses no formula. The options that a person gave and that cost too much come first:
leaving them out changes nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, islice
from types import MappingProxyType
from typing import Any

from zerosim.analysis.candidate import accepted, candidate, with_micro_batches
from zerosim.analysis.capabilities.experts import more_shared
from zerosim.analysis.capabilities.zero import without_prefetch
from zerosim.analysis.formulas import STATES
from zerosim.analysis.left_out import left_out
from zerosim.analysis.meshes import divisors, wider
from zerosim.analysis.offload_ways import offloads, other_memories
from zerosim.analysis.recompute import ever_more_recompute
from zerosim.analysis.search import no_reserve
from zerosim.config import OPTIONS, RunConfig
from zerosim.config.parts.allocators import is_exact, without_fragmentation
from zerosim.config.parts.memory import WITH_THE_HEAD
from zerosim.errors import InputError, OutOfMemory
from zerosim.placement.mesh import MODEL
from zerosim.units import format_bytes

MOST_RANKS = 64
FLASH: Mapping[str, Any] = MappingProxyType({"attention": "flash"})
LimitedTrial = Callable[[RunConfig, int], Mapping[str, int]]
"""Bytes by kind of the fullest rank, on devices of that capacity; more than the capacity if that is too
small. Raises: OutOfMemory if another memory is too small, InputError for what cannot be planned."""


def cheapest_fit(config: RunConfig, capacity: int, trial: LimitedTrial, *, given: Collection[str] = ()) -> str | None:
    """Return the first change that fits, as flags and its counted peak; None if no tried change fits. Offload is tried
    if the configuration has a memory for it."""
    memories = other_memories(config)
    return next(iter(cheapest_fits(config, capacity, trial, most=1, memories=memories, given=given)), None)


def cheapest_fits(
    config: RunConfig,
    capacity: int,
    trial: LimitedTrial,
    *,
    reserve: Callable[[RunConfig], int] = no_reserve,
    most: int = 3,
    memories: Collection[str] = (),
    given: Collection[str] = (),
) -> list[str]:
    """Return the first changes that fit beside a reserve, cheapest first, as flags and peaks. No change contains
    another one. `memories` are those beside the device's (`other_memories`), `given` the options that a person gave.

    Given options that cost too much come first. If nothing fits with all of them, some are left out of the change that
    needs least. More ranks come last, and only if nothing else fits. They shrink model states only: if the rest alone
    is too large with some number of ranks, no larger number is tried.
    """
    found: list[str] = []
    enough: list[set[str]] = []
    combined = _combined(config)
    least = _smallest(combined[-1])

    @cache
    def by_kind(changed: RunConfig) -> Mapping[str, int]:
        """Return the bytes that the device needs; none where another memory is too small, or no plan is possible."""
        try:
            return trial(changed, capacity - reserve(changed))
        except (InputError, OutOfMemory):
            return {}

    def fits(changed: RunConfig) -> bool:
        return 0 < sum(by_kind(changed).values()) <= capacity - reserve(changed)

    def collect(ways: Iterable[tuple[RunConfig, str]]) -> None:
        for changed, words in ways:
            more_ranks, options = changed.mesh.ranks > config.mesh.ranks, set(re.findall(r"--\S+", words))
            if found and more_ranks:
                return
            if any(fewer <= options for fewer in enough):
                continue
            held, kept = by_kind(changed), reserve(changed)
            if fits(changed):
                takes = "its peak is" if is_exact(config.memory) else "the allocator takes"
                beside = f", beside {format_bytes(kept)} outside the program" if kept else ""
                taken = format_bytes(sum(held.values()))
                found.append(f"{words} would fit: {takes} {taken} of {format_bytes(capacity)}{beside}")
                enough.append(options)
                if len(found) == most:
                    return
            elif more_ranks and sum(held.values()) - sum(held.get(kind, 0) for kind in STATES) > capacity - kept:
                return

    collect((changed, f"leaving out {gone}") for changed, gone in left_out(config, given, fits))
    if len(found) < most:
        collect((changed, flags_of(config, changed)) for changed in _with_these_ranks(config, combined, memories))
    if not found:
        flags = flags_of(config, least)
        collect((changed, f"{flags} without {gone}") for changed, gone in left_out(least, given, fits))
        collect((changed, flags_of(config, changed)) for changed in _with_more_ranks(config, least))
    return found


def leaner_losses(config: RunConfig, rows: int | None = None) -> list[str]:
    """Return loss modes that hold less of the logits than the configuration's own, cheapest first.

    `chunked` holds a second gradient of the head (V, D) where others hold logits (tokens, V): no gain for few tokens.
    `rows`: a microbatch's, if not the configuration's.
    """
    own, tokens = config.memory.loss, (rows or config.data.micro_batch) * config.model.seq
    leaner = ["in-place"] if own not in ("in-place", *WITH_THE_HEAD) else []
    leaner += ["chunked"] if own not in WITH_THE_HEAD and tokens > config.model.hidden else []
    return leaner if config.model.has_blocks else []


def changes(config: RunConfig, memories: Collection[str] = ()) -> Iterator[tuple[RunConfig, str]]:
    """Yield configurations of the same model and the flags that lead there, cheapest first.

    These are: an allocator's setting against fragmentation, the logits' gradient written over the logits (another
    kernel, the same work), no prefetch (costs only time), a higher ZeRO stage (costs only traffic), a layer's experts
    shared by more ranks (tokens travel), another attention kernel, the logits in chunks (runs the head again),
    recomputing the attention core, a smaller microbatch with more accumulation (the same global batch, smaller
    matrices), recomputing whole blocks (a third more arithmetic), all of them, every row over several ranks with more
    accumulation (attention sends), that and all of the others, model states in other `memories` (the CPU's step, and
    copies), these and all of the others, and more ranks (more devices).
    """
    combined = _combined(config)
    more_ranks = _with_more_ranks(config, combined[-1])
    for changed in chain(_with_these_ranks(config, combined, memories), more_ranks):
        yield changed, flags_of(config, changed)


def flags_of(config: RunConfig, changed: RunConfig) -> str:
    """Return the added flags, such as '--stage 3 --micro-batch 2'."""
    before, after = config.to_dict(), changed.to_dict()
    states = ("allocator_conf", "prefetch", "prefetch_elements", "max_live", "stage", "offload")
    names = (
        *states,
        "attention",
        "loss",
        "recompute",
        "micro_batch",
        "cp",
        "context",
        "ep",
        "etp",
        "accumulate",
        "ranks",
    )
    return " ".join(f"--{name.replace('_', '-')} {after[name]}" for name in names if after[name] != before[name])


def _with_these_ranks(
    config: RunConfig, combined: Sequence[RunConfig], memories: Collection[str]
) -> Iterator[RunConfig]:
    conf = without_fragmentation(config.memory)
    more, stage = ever_more_recompute(config)[1:], config.parallel.zero_stage
    leaner = leaner_losses(config)
    ways: list[Mapping[str, Any]] = [
        *([{"allocator_conf": conf}] if conf is not None else []),
        *({"loss": loss} for loss in leaner if loss == "in-place"),
        *without_prefetch(config),
        *({"stage": higher} for higher in range(stage + 1, 4)),
        *(more_shared(config) if stage < 3 else []),
        *([FLASH] if _takes_flash(config) else []),
        *({"loss": loss} for loss in leaner if loss == "chunked"),
        *({"recompute": again} for again in more if again == "selective"),
    ]
    yield from accepted(candidate(config, **values) for values in ways)
    yield from _smaller(config)
    if "full" in more:
        yield from accepted([candidate(config, recompute="full")])
    for number, least in enumerate(combined[1:]):
        if number:  # alone the first was tried above
            yield least
        yield from _smaller(least)
    yield from wider(_smallest(config))
    least = _smallest(combined[-1])
    if len(combined) > 1:
        yield from wider(least)
    yield from offloads(config, memories)
    if len(combined) > 1:
        yield from offloads(least, memories)


def _combined(config: RunConfig) -> list[RunConfig]:
    """Return the configuration, then the changes that save most, each together with those before it. Of a refused one
    the next weaker is taken; if all are refused, it is left out."""
    more, chunked = ever_more_recompute(config)[:0:-1], [one for one in leaner_losses(config, 1) if one == "chunked"]
    ladder: tuple[list[Mapping[str, Any]], ...] = (
        [{"stage": stage} for stage in range(3, config.parallel.zero_stage, -1)],
        [FLASH] if _takes_flash(config) else [],
        [{"loss": loss} for loss in chunked],
        [{"recompute": again} for again in more],
    )
    found = [config]
    for ways in ladder:
        found += islice(accepted(candidate(found[-1], **values) for values in ways), 1)
    return found


def _takes_flash(config: RunConfig) -> bool:
    return config.memory.attention == "eager" and config.model.has_blocks


def _smaller(config: RunConfig) -> Iterator[RunConfig]:
    """Yield smaller microbatches with more accumulation: every divisor of the microbatch, largest first."""
    own, accumulate = config.data.micro_batch, config.data.accumulate
    fewer = [rows for rows in divisors(own) if rows < own]
    yield from accepted(
        candidate(config, micro_batch=rows, accumulate=accumulate * own // rows) for rows in fewer[::-1]
    )


def _smallest(config: RunConfig) -> RunConfig:
    """Return the configuration with the smallest microbatch that it can have."""
    return [config, *_smaller(config)][-1]


def _with_more_ranks(config: RunConfig, least: RunConfig) -> Iterator[RunConfig]:
    ranks, at_once = 2 * config.mesh.ranks, config.mesh.axes.size(*MODEL)
    while ranks <= min(max(MOST_RANKS, 8 * config.mesh.ranks), int(OPTIONS["ranks"].high or ranks)):
        rows = config.global_batch * at_once // ranks
        yield from accepted([with_micro_batches(least, rows, micro_batch=1, ranks=ranks)])
        ranks *= 2
