"""What one block may recompute, and how many blocks of a pipeline stage make which choice: a knapsack.

A plan of the model, in which each block makes another choice, counts the bytes that it saves, and its kernels take
modelled seconds. Blocks are alike, so a mix is a number of blocks for each choice.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from operator import itemgetter
from typing import NamedTuple

from zerosim.analysis.candidate import candidate, with_micro_batches
from zerosim.config import RunConfig
from zerosim.config.presets.cluster import Cluster
from zerosim.device.events import Kernel, Launch
from zerosim.ledger.activations import ActivationLedger
from zerosim.ledger.costs_of import costs_of
from zerosim.placement.mesh import CUTS
from zerosim.placement.spec import is_block
from zerosim.placement.stages import number_of
from zerosim.train.plan import plan
from zerosim.train.result import RunResult

PARTS = (("core_attn",), ("mla_up_proj",), ("attn_proj",), ("layernorm",), ("mlp_act", "mlp"), ("dropout",))
"""Parts of a block; a choice has at most one of each group."""


class Choice(NamedTuple):
    """A value of --recompute for one block: the bytes that the block saves of one microbatch, and its seconds."""

    nbytes: int
    seconds: float
    word: str


Linked = tuple[Choice, "Linked | None"]


class Mix(NamedTuple):
    """The choices of a pipeline stage's blocks: their seconds, their bytes, and one of them with those before it."""

    seconds: float
    nbytes: int
    last: Linked | None

    @property
    def words(self) -> list[str]:
        """The blocks' words, those that save least first."""
        found, last = list[Choice](), self.last
        while last is not None:
            one, last = last
            found.append(one)
        return [one.word for one in sorted(found)]


def stage_of(result: RunResult, rank: int) -> int:
    """Return a rank's pipeline stage. Pipeline stages are the slowest axis."""
    return rank * result.config.chunks.stages // len(result.memory)


def choices_of(config: RunConfig, cluster: Cluster) -> list[Choice]:
    """Return the choices of one block.

    In a plan of the model each block makes another choice. Its seconds are those of its kernels, and of collectives
    that they wait for."""
    few = (with_micro_batches(config).config or config).replace(
        steps=None, capacity=None, allocator="exact", allocator_conf=None
    )
    kinds = [few.model.kind(block) for block in range(few.model.depths[0])]
    usual = Counter(kinds).most_common(1)[0][0]
    alike, words, found = [n for n, kind in enumerate(kinds) if kind == usual], list(words_of(few)), list[Choice]()
    costs = costs_of(few, cluster)
    for some in (words[at : at + len(alike)] for at in range(0, len(words), len(alike))):
        asked = dict(zip(alike, some, strict=False))
        result = plan(
            few.replace(recompute="+".join(f"{block}={word}" for block, word in asked.items())), keep_events=True
        )
        saved, seconds = defaultdict[int, int](int), defaultdict[int, float](float)
        for rank in {stage_of(result, rank): rank for rank in result.ran}.values():
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


def words_of(config: RunConfig) -> Iterator[str]:
    """Yield what one block may recompute, as far as the configuration accepts it."""
    lists = (",".join(filter(None, some)) for some in product(*(("", *names) for names in PARTS)))
    plain = not config.value("dropout")
    every = ["none", *(f"selective:{names}" for names in lists if names and not (plain and "dropout" in names)), "full"]
    yield from (word for word in every if candidate(config, recompute=word).config is not None)


def efficient(choices: Iterable[Choice]) -> list[Choice]:
    """Return the choices of which each saves more than the one before it, and takes fewer seconds."""
    found = list[Choice]()
    for choice in sorted(choices):
        if not found or choice.seconds < found[-1].seconds:
            found.append(choice)
    return found


def mixes_of(choices: Sequence[Choice], count: int) -> list[Mix]:
    """Return the mixes of so many blocks that save less than each faster one, the fastest first. Without one of its
    blocks each is such a mix of fewer."""
    found = [Mix(0.0, 0, None)]
    for _ in range(count):
        grown = [
            Mix(mix.seconds + one.seconds, mix.nbytes + one.nbytes, (one, mix.last)) for mix in found for one in choices
        ]
        found, best = [], math.inf
        for mix in sorted(grown, key=itemgetter(0, 1)):
            if mix.nbytes < best:
                best = mix.nbytes
                found.append(mix)
    return found
