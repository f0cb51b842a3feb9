"""Find the cheapest changes of a configuration that fit on a device that is too small for it.

The search runs configurations and uses no formula. The options that a person gave and that cost too much come first:
leaving them out changes nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, islice
from typing import Any, NamedTuple

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
from zerosim.config.presets.recipes import FUSED_LOSS, USUAL, find_recipe
from zerosim.errors import InputError, OutOfMemory
from zerosim.placement.mesh import MODEL
from zerosim.units import format_bytes

MOST_RANKS = 64
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


class Change(NamedTuple):
    """A kind of change: its price, and the values to try, cheapest first."""

    price: str
    values: Callable[[RunConfig], Iterable[Mapping[str, Any]]]


def _segments(config: RunConfig) -> Iterator[Mapping[str, Any]]:
    if (conf := without_fragmentation(config.memory)) is not None:
        yield {"allocator_conf": conf}


def _losses(config: RunConfig) -> Iterator[Mapping[str, Any]]:
    yield from ({"loss": loss} for loss in leaner_losses(config) if loss != "chunked")


def _chunks(config: RunConfig) -> Iterator[Mapping[str, Any]]:
    yield from ({"loss": loss} for loss in leaner_losses(config) if loss == "chunked")


def _stages(config: RunConfig) -> Iterator[Mapping[str, Any]]:
    given = config.given.get("recipe", USUAL)
    has = range(4) if given == USUAL else find_recipe(given).stages
    yield from ({"stage": higher} for higher in range(config.parallel.zero_stage + 1, 4) if higher in has)
    yield from more_shared(config) if config.parallel.zero_stage < 3 else ()


def _flash(config: RunConfig) -> Iterator[Mapping[str, Any]]:
    if config.memory.attention == "eager" and config.model.has_blocks:
        yield {"attention": "flash"}


def _parts(config: RunConfig) -> Iterator[Mapping[str, Any]]:
    yield from ({"recompute": again} for again in ever_more_recompute(config)[1:] if again != "full")


def _rows(config: RunConfig) -> Iterator[Mapping[str, Any]]:
    """Yield smaller microbatches with more accumulation: every divisor of the microbatch, largest first."""
    own, accumulate = config.data.micro_batch, config.data.accumulate
    fewer = [rows for rows in divisors(own) if rows < own]
    yield from ({"micro_batch": rows, "accumulate": accumulate * own // rows} for rows in fewer[::-1])


def _blocks(config: RunConfig) -> Iterator[Mapping[str, Any]]:
    if "full" in ever_more_recompute(config)[1:]:
        yield {"recompute": "full"}


CHANGES = (
    Change("nothing", _segments),
    Change("another kernel, the same work", _losses),
    Change("time: gathers are waited for", without_prefetch),
    Change("traffic", _stages),
    Change("another kernel", _flash),
    Change("the head runs again", _chunks),
    Change("these parts run again", _parts),
    Change("smaller matrices, the same global batch", _rows),
    Change("a third more arithmetic", _blocks),
)
"""The changes of one kind, cheapest first. After them come several at once, rows that several ranks share, offload, and
more ranks."""


def leaner_losses(config: RunConfig, rows: int | None = None) -> list[str]:
    """Return losses that hold less of the logits than the configuration's own, cheapest first, as its recipe's users
    have them: Megatron-LM's fused loss, Liger's fused loss with the head in PyTorch, and zerosim's own with the paper.

    Losses with the head hold a second gradient of the head (V, D) where others hold logits (tokens, V): no gain for few
    tokens. `rows`: a microbatch's, if not the configuration's.
    """
    own, tokens = config.memory.loss, (rows or config.data.micro_batch) * config.model.seq
    recipe = config.parallel.recipe
    names = (FUSED_LOSS[recipe],) if recipe in FUSED_LOSS else ("in-place", "chunked")
    if not config.model.has_blocks or own in WITH_THE_HEAD:
        return []
    few = tokens <= config.model.hidden
    return [name for name in names if name != own and not (few and name in WITH_THE_HEAD)]


def changes(config: RunConfig, memories: Collection[str] = ()) -> Iterator[tuple[RunConfig, str]]:
    """Yield configurations of the same model and the flags that lead there, cheapest first: those of `CHANGES`, the
    strongest of them together, every row over several ranks with more accumulation (attention sends), model states in
    other `memories` (the CPU's step, and copies), all of these, and more ranks (more devices)."""
    combined = _combined(config)
    more_ranks = _with_more_ranks(config, combined[-1])
    for changed in chain(_with_these_ranks(config, combined, memories), more_ranks):
        yield changed, flags_of(config, changed)


def changes_alone(config: RunConfig) -> Iterator[tuple[RunConfig, str]]:
    """Yield configurations with a change of one kind, cheapest first, and its price."""
    for change in CHANGES:
        for changed in accepted(candidate(config, **values) for values in change.values(config)):
            yield changed, change.price


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
    yield from (changed for changed, _ in changes_alone(config))
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
    more, losses = ever_more_recompute(config)[:0:-1], [one for one in leaner_losses(config, 1) if one != "in-place"]
    ladder: tuple[list[Mapping[str, Any]], ...] = (
        [{"stage": stage} for stage in range(3, config.parallel.zero_stage, -1)],
        [*_flash(config)],
        [{"loss": loss} for loss in losses],
        [{"recompute": again} for again in more],
    )
    found = [config]
    for ways in ladder:
        found += islice(accepted(candidate(found[-1], **values) for values in ways), 1)
    return found


def _smaller(config: RunConfig) -> Iterator[RunConfig]:
    yield from accepted(candidate(config, **values) for values in _rows(config))


def _smallest(config: RunConfig) -> RunConfig:
    """Return the configuration with the smallest microbatch that it can have."""
    return [config, *_smaller(config)][-1]


def _with_more_ranks(config: RunConfig, least: RunConfig) -> Iterator[RunConfig]:
    ranks, at_once = 2 * config.mesh.ranks, config.mesh.axes.size(*MODEL)
    while ranks <= min(max(MOST_RANKS, 8 * config.mesh.ranks), int(OPTIONS["ranks"].high or ranks)):
        rows = config.global_batch * at_once // ranks
        yield from accepted([with_micro_batches(least, rows, micro_batch=1, ranks=ranks)])
        ranks *= 2
