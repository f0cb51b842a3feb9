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
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, combinations, groupby, pairwise
from typing import NamedTuple

from zerosim.analysis.candidate import candidate
from zerosim.analysis.recompute_choices import Choice, Mix, choices_of, efficient, mixes_of, stage_of
from zerosim.config import RunConfig
from zerosim.config.parts.allocators import feels_limit, is_exact
from zerosim.config.presets.cluster import Cluster
from zerosim.errors import OutOfMemory
from zerosim.train.plan import judged, plan

PLAIN = ("none", "selective", "full")
"""What all blocks may do alike. The answer is never slower."""
HIDDEN = 0.001
"""If collectives hide this share of a step's recompute, its places are varied."""
PERCENTS = (100, 98, 96, 93, 90, 85, 80)
"""The room for exact bytes where an allocator leaves holes."""
MOST_BLOCKS, FEWEST_TRIES = 320, 12
"""The most blocks in all whole plans of mixes together, and how many plans there may be however many blocks."""


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

    fitting = [seen for word in PLAIN if (seen := whole(word)) is not None and seen.fits(room)]
    most, least = whole("none"), whole("full")
    if not is_exact(config.memory):
        fitting += _without_holes(config, room, cluster, whole)
    elif most is not None and least is not None and not most.fits(room) and not config.model.is_second:
        fitting += _mixed(most, least, room, cluster, whole)
    return min(fitting, key=lambda seen: seen.seconds).config if fitting else None


def _without_holes(config: RunConfig, room: int, cluster: Cluster, whole: Whole) -> Iterator[Seen]:
    """Yield a plan with the configuration's allocator, of what is chosen for exact bytes: in ever less room, until it
    fits."""
    exact = config.replace(allocator="exact", allocator_conf=None, capacity=None)
    for percent in PERCENTS:
        found = auto(exact, room * percent // 100, cluster)
        seen = None if found is None else whole(found.memory.recompute)
        if found is None or (seen is not None and seen.fits(room)):
            yield from [] if seen is None else [seen]
            return


def _seen(config: RunConfig, room: int, cluster: Cluster) -> Seen | None:
    """Plan a whole step. A device that feels its limit has that of `room`; None if it or another memory refuses."""
    try:
        result = plan(judged(config, room if feels_limit(config.memory) else None), cluster=cluster)
    except OutOfMemory:
        return None
    peaks = [0] * config.chunks.stages
    for rank in result.ran:
        stage = stage_of(result, rank)
        peaks[stage] = max(peaks[stage], result.memory[rank].reserved_bytes)
    assert result.time is not None
    return Seen(config, result.time.seconds, peaks)


def _mixed(most: Seen, least: Seen, room: int, cluster: Cluster, whole: Whole) -> Iterator[Seen]:
    """Yield whole plans of mixes that fit. A plan that does not fit raises the estimate of the bytes that its pipeline
    stage holds beside saved ones, until one fits. Then faster mixes are planned, as far as the lowest estimate says."""
    config, stages = most.config, _blocks_of_stages(most.config)
    found_choices = choices_of(config, cluster)
    saved, choices = {one.word: one.nbytes for one in found_choices}, efficient(found_choices)
    made = {count: mixes_of(choices, count) for count in {len(blocks) for blocks in stages}}
    live = [1.0] * len(stages)  # microbatches whose saves a pipeline stage holds
    for at, blocks in enumerate(stages if len(stages) > 1 else ()):
        held = (most.peaks[at] - least.peaks[at]) / max(1, len(blocks) * (saved["none"] - saved["full"]))
        live[at] = max(1.0, math.ceil(held * config.chunks.each) / config.chunks.each)
    beside = [peak - times * saved["none"] * len(of) for peak, times, of in zip(most.peaks, live, stages, strict=True)]
    lowest, failed, found = [math.inf] * len(stages), set[tuple[int, float, int]](), list[Mix]()

    def fastest(at: int) -> Mix | None:
        held, mixes = (lowest if found else beside)[at], made[len(stages[at])]
        may = (mix for mix in mixes if held + live[at] * mix.nbytes <= room and (at, *mix[:2]) not in failed)
        return next(may, None)

    tries = max(FEWEST_TRIES, MOST_BLOCKS // sum(map(len, stages)))
    for _ in range(tries):
        mixes = [mix for mix in map(fastest, range(len(stages))) if mix is not None]
        is_new = len(mixes) == len(stages) and mixes != found
        if not is_new or (seen := whole(_spelled(stages, [mix.words for mix in mixes]))) is None:
            break
        for at, mix in enumerate(mixes):
            held = seen.peaks[at] - live[at] * mix.nbytes
            lowest[at] = min(lowest[at], held)
            if seen.peaks[at] > room:
                failed.add((at, *mix[:2]))
                beside[at] = max(beside[at], held)
        if seen.fits(room):
            found, best = mixes, seen
            yield seen
    if found and len(stages) == 1:
        own = config.data.accumulate * (found[0].seconds - len(stages[0]) * min(one.seconds for one in choices))
        if best.seconds < (1 - HIDDEN) * (most.seconds + own):
            yield from _climbed(best, found[0].words, choices, whole, room, tries)
    for last in choices if not found else ():  # what the last block recomputes is live beside all that is saved
        words = [(*(choices[0].word for _ in blocks[1:]), *(last.word for _ in blocks[:1])) for blocks in stages]
        seen = whole(_spelled(stages, words))
        if seen is not None and seen.fits(room):
            yield seen


def _climbed(
    best: Seen,
    words: Sequence[str],
    choices: Sequence[Choice],
    whole: Whole,
    room: int,
    tries: int,
) -> Iterator[Seen]:
    """Yield ever faster plans: each swaps two blocks of the one before, or changes one. Collectives hide what some
    blocks recompute, and only a plan says of which."""
    asked = iter(_neighbours(words, choices))
    for _ in range(tries):
        if (other := next(asked, None)) is None:
            return
        seen = whole(_spelled([range(len(other))], [other]))
        if seen is not None and seen.fits(room) and seen.seconds < best.seconds:
            best, asked = seen, iter(_neighbours(other, choices))
            yield seen


def _neighbours(words: Sequence[str], choices: Sequence[Choice]) -> Iterator[list[str]]:
    for a, b in combinations(range(len(words)), 2):
        if words[a] != words[b]:
            swapped = list(words)
            swapped[a], swapped[b] = words[b], words[a]
            yield swapped
    for at, word in enumerate(words):
        yield from ([*words[:at], one.word, *words[at + 1 :]] for one in choices if one.word != word)


def _spelled(stages: Sequence[Sequence[int]], words: Sequence[Sequence[str]]) -> str:
    """Return the value of --recompute for these words of pipeline stages' blocks."""
    by_block = dict[int, str]()
    for blocks, own in zip(stages, words, strict=True):
        by_block |= dict(zip(blocks, own, strict=True))
    runs = [(word, list(same)) for word, same in groupby(sorted(by_block), by_block.__getitem__)]
    ranges = [
        f"{'-'.join(map(str, dict.fromkeys((same[0], same[-1]))))}={word}" for word, same in runs if word != "none"
    ]
    return "+".join(ranges) if len(runs) > 1 else runs[0][0]


def _blocks_of_stages(config: RunConfig) -> list[list[int]]:
    """Return the numbers of each pipeline stage's blocks."""
    of_chunk = [range(*ends) for ends in pairwise([0, *accumulate(config.layers_by_chunk(config.model.depths[0]))])]
    return [[n for chunk in config.chunks.of_stage(at) for n in of_chunk[chunk]] for at in range(config.chunks.stages)]
