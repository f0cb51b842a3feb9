"""`--recompute auto`: the parts of each block to recompute, so that a step fits and takes the fewest seconds.

PyTorch's selective checkpoints ask this of each op, and solve an integer program. Here blocks are alike, so the answer
is how many blocks make each choice:

    a choice  a list of parts, or the whole block. A plan counts the bytes that the block saves, and models its seconds
    a mix     how many blocks of a pipeline stage make which choice: a knapsack. Blocks that save least come first,
              because backward frees the last blocks first
    a plan    of the whole model: only its peak says whether a mix fits

The answer is planned whole, and never slower than none, selective or full for all blocks.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, combinations_with_replacement, groupby, pairwise, product
from typing import NamedTuple

from zerosim.analysis.candidate import candidate, with_micro_batches
from zerosim.analysis.recompute import number_of
from zerosim.config import RunConfig
from zerosim.config.parts.allocators import feels_limit
from zerosim.config.presets.cluster import Cluster
from zerosim.device.events import Kernel, Launch
from zerosim.errors import OutOfMemory
from zerosim.ledger.activations import ActivationLedger
from zerosim.ledger.costs_of import costs_of
from zerosim.placement.mesh import CUTS
from zerosim.placement.spec import is_block
from zerosim.train.plan import judged, plan
from zerosim.train.result import RunResult

PLAIN = ("none", "selective", "full")
"""What all blocks may do alike. The answer is never slower."""
PARTS = (("core_attn",), ("mla_up_proj",), ("attn_proj",), ("layernorm",), ("mlp_act", "mlp"), ("dropout",))
"""Parts of a block; a choice has at most one of each group."""
ALL_MIXES = 3000
"""Up to so many mixes of a pipeline stage are all looked at; of more, those that save least in some time."""
MOST_BLOCKS, FEWEST_TRIES = 600, 12
"""The most blocks in all whole plans of mixes together, and how many plans there may be however many blocks."""


class Choice(NamedTuple):
    """A value of --recompute for one block: the bytes that the block saves of one microbatch, and its seconds."""

    nbytes: int
    seconds: float
    word: str


class Mix(NamedTuple):
    """The choices of a pipeline stage's blocks, those that save least first: their seconds, bytes and words."""

    seconds: float
    nbytes: int
    words: tuple[str, ...]


class Seen(NamedTuple):
    """A whole plan: a step's seconds, and the peak of each pipeline stage."""

    config: RunConfig
    seconds: float
    peaks: Sequence[int]

    def fits(self, room: int) -> bool:
        return max(self.peaks) <= room


Whole = Callable[[str], Seen | None]
"""Plans a value of --recompute."""


def auto(config: RunConfig, room: int, cluster: Cluster) -> RunConfig | None:
    """Return the configuration with the recompute that takes the fewest seconds on this cluster within `room` bytes of
    each device; None if nothing fits."""

    @cache
    def whole(word: str) -> Seen | None:
        made = candidate(config, recompute=word).config
        return None if made is None else _seen(made, room, cluster)

    plain = [seen for seen in map(whole, PLAIN) if seen is not None]
    fitting = [seen for seen in plain if seen.fits(room)]
    most, least = whole("none"), whole("full")
    if most is not None and least is not None and not most.fits(room) and not config.model.is_second:
        fitting += _mixed(most, least, room, cluster, whole)
    return min(fitting, key=lambda seen: seen.seconds).config if fitting else None


def _seen(config: RunConfig, room: int, cluster: Cluster) -> Seen | None:
    """Plan a whole step. A device that feels its limit has that of `room`; None if it or another memory refuses."""
    try:
        result = plan(judged(config, room if feels_limit(config.memory) else None), cluster=cluster)
    except OutOfMemory:
        return None
    peaks = [0] * config.chunks.stages
    for rank in result.ran:
        stage = _stage_of(result, rank)
        peaks[stage] = max(peaks[stage], result.memory[rank].reserved_bytes)
    assert result.time is not None
    return Seen(config, result.time.seconds, peaks)


def _stage_of(result: RunResult, rank: int) -> int:
    """Return a rank's pipeline stage. Pipeline stages are the slowest axis."""
    return rank * result.config.chunks.stages // len(result.memory)


def _mixed(most: Seen, least: Seen, room: int, cluster: Cluster, whole: Whole) -> Iterator[Seen]:
    """Yield whole plans of mixes that fit. A plan that does not fit raises the estimate of the bytes that its pipeline
    stage holds beside saved ones, until one fits. Then faster mixes are planned, as far as the lowest estimate says."""
    config, stages = most.config, _blocks_of_stages(most.config)
    found_choices = _choices(config, cluster)
    saved, choices = {one.word: one.nbytes for one in found_choices}, _efficient(found_choices)
    made = {count: _mixes(choices, count) for count in {len(blocks) for blocks in stages}}
    live = [1.0] * len(stages)  # microbatches whose saves a pipeline stage holds
    for at, blocks in enumerate(stages if len(stages) > 1 else ()):
        held = (most.peaks[at] - least.peaks[at]) / max(1, len(blocks) * (saved["none"] - saved["full"]))
        live[at] = max(1.0, math.ceil(held * config.chunks.each) / config.chunks.each)
    beside = [peak - times * saved["none"] * len(of) for peak, times, of in zip(most.peaks, live, stages, strict=True)]
    lowest, failed, found = [math.inf] * len(stages), set[tuple[int, Mix]](), list[Mix]()

    def fastest(at: int) -> Mix | None:
        held, mixes = (lowest if found else beside)[at], made[len(stages[at])]
        may = (mix for mix in mixes if held + live[at] * mix.nbytes <= room and (at, mix) not in failed)
        return next(may, None)

    for _ in range(max(FEWEST_TRIES, MOST_BLOCKS // sum(map(len, stages)))):
        mixes = [mix for mix in map(fastest, range(len(stages))) if mix is not None]
        seen = whole(_spelled(stages, mixes)) if len(mixes) == len(stages) and mixes != found else None
        if seen is None:
            break
        for at, mix in enumerate(mixes):
            held = seen.peaks[at] - live[at] * mix.nbytes
            lowest[at] = min(lowest[at], held)
            if seen.peaks[at] > room:
                failed.add((at, mix))
                beside[at] = max(beside[at], held)
        if seen.fits(room):
            found = mixes
            yield seen
    for last in choices if not found else ():  # what the last block recomputes is live beside all that is saved
        words = [(*(choices[0].word for _ in blocks[1:]), *(last.word for _ in blocks[:1])) for blocks in stages]
        seen = whole(_spelled(stages, [Mix(0.0, 0, own) for own in words]))
        if seen is not None and seen.fits(room):
            yield seen


def _spelled(stages: Sequence[Sequence[int]], mixes: Sequence[Mix]) -> str:
    """Return the value of --recompute for these mixes of pipeline stages' blocks."""
    by_block = dict[int, str]()
    for blocks, mix in zip(stages, mixes, strict=True):
        by_block |= dict(zip(blocks, mix.words, strict=True))
    runs = [(word, list(same)) for word, same in groupby(sorted(by_block), by_block.__getitem__)]
    ranges = [
        f"{'-'.join(map(str, dict.fromkeys((same[0], same[-1]))))}={word}" for word, same in runs if word != "none"
    ]
    return "+".join(ranges) if len(runs) > 1 else runs[0][0]


def _blocks_of_stages(config: RunConfig) -> list[list[int]]:
    """Return the numbers of each pipeline stage's blocks."""
    of_chunk = [range(*ends) for ends in pairwise([0, *accumulate(config.layers_by_chunk(config.model.depths[0]))])]
    return [[n for chunk in config.chunks.of_stage(at) for n in of_chunk[chunk]] for at in range(config.chunks.stages)]


def _choices(config: RunConfig, cluster: Cluster) -> list[Choice]:
    """Return the choices of one block.

    In a plan of the model each block makes another choice. Its seconds are those of its kernels, and of collectives
    that they wait for."""
    few = (with_micro_batches(config).config or config).replace(
        steps=None, capacity=None, allocator="exact", allocator_conf=None
    )
    kinds = [few.model.kind(block) for block in range(few.model.depths[0])]
    usual = Counter(kinds).most_common(1)[0][0]
    alike, words, found = [n for n, kind in enumerate(kinds) if kind == usual], list(_words(few)), list[Choice]()
    costs = costs_of(few, cluster)
    for some in (words[at : at + len(alike)] for at in range(0, len(words), len(alike))):
        asked = dict(zip(alike, some, strict=False))
        result = plan(
            few.replace(recompute="+".join(f"{block}={word}" for block, word in asked.items())), keep_events=True
        )
        saved, seconds = defaultdict[int, int](int), defaultdict[int, float](float)
        for rank in {_stage_of(result, rank): rank for rank in result.ran}.values():
            ledger = ActivationLedger()
            ledger.read(result.events[rank])
            for unit, rows in ledger.saved().items():
                if is_block(unit):
                    saved[number_of(unit)] = sum(row.nbytes for row in rows)
            for event in result.events[rank]:
                if isinstance(event, Kernel) and event.work is None and is_block(event.scope.block):
                    seconds[number_of(event.scope.block)] += costs.kernel(event)
                elif isinstance(event, Launch) and event.axis in CUTS and is_block(event.scope.block):
                    seconds[number_of(event.scope.block)] += costs.collective(event)
        found += [Choice(saved[block], seconds[block] / few.data.accumulate, word) for block, word in asked.items()]
    return found


def _words(config: RunConfig) -> Iterator[str]:
    """Yield what one block may recompute, as far as the configuration accepts it."""
    lists = (",".join(filter(None, some)) for some in product(*(("", *names) for names in PARTS)))
    plain = not config.value("dropout")
    every = ["none", *(f"selective:{names}" for names in lists if names and not (plain and "dropout" in names)), "full"]
    yield from (word for word in every if candidate(config, recompute=word).config is not None)


def _efficient(choices: Iterable[Choice]) -> list[Choice]:
    """Return the choices of which each saves more than the one before it, and takes fewer seconds."""
    found = list[Choice]()
    for choice in sorted(choices):
        if not found or choice.seconds < found[-1].seconds:
            found.append(choice)
    return found


def _mixes(choices: Sequence[Choice], count: int) -> list[Mix]:
    """Return the mixes of so many blocks, the fastest first: all of few; of many those of two choices and any two
    further blocks, without those that save more than a faster one."""

    def mix(some: Iterable[Choice]) -> Mix:
        some = sorted(some)
        return Mix(sum(one.seconds for one in some), sum(one.nbytes for one in some), tuple(one.word for one in some))

    if math.comb(len(choices) + count - 1, count) <= ALL_MIXES:
        return sorted(map(mix, combinations_with_replacement(choices, count)))
    pairs, best, found = list(combinations_with_replacement(choices, 2)), math.inf, list[Mix]()
    sums = ((a, b, k, c, d) for (a, b), (c, d) in product(pairs, pairs) for k in range(count - 1))
    many = [
        (k * a.seconds + (count - 2 - k) * b.seconds + c.seconds + d.seconds,
         k * a.nbytes + (count - 2 - k) * b.nbytes + c.nbytes + d.nbytes, (a, b, k, c, d))
        for a, b, k, c, d in sums
    ]  # fmt: skip
    for _, nbytes, (a, b, k, c, d) in sorted(many, key=lambda one: one[:2]):
        if nbytes < best:
            best = nbytes
            found.append(mix([*[a] * k, *[b] * (count - 2 - k), c, d]))
    return found
