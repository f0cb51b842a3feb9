"""The exercises on time: how far ahead to gather, and into how many microbatches a batch is cut.

Nothing is trained. The first is judged by the clock (`ledger/clock.py`), the second by the slots of the schedules'
own lists (`analysis/slots.py`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from zerosim.analysis.slots import counted_bubble, slots_of
from zerosim.device.events import Copy, Kernel, Launch, Scope, Wait
from zerosim.grading.asking import Wrong
from zerosim.grading.plain import shown
from zerosim.ledger.clock import simulate
from zerosim.ledger.entries import Busy, Entry
from zerosim.parallel.pipeline import SCHEDULES
from zerosim.placement.mesh import Mesh

SMALL = (
    ((5,), (3,)), ((2, 2, 2, 2), (1, 1, 1, 1)), ((1, 1, 1, 1), (2, 2, 2, 2)), ((6, 1, 1, 6), (1, 1, 1, 7)),
    ((9, 1, 1, 1, 9), (1, 2, 2, 2, 2)), ((1, 9, 1, 1), (1, 1, 1, 9)),
)  # fmt: skip
"""Seconds in which units compute, and of their gathers."""
PIPELINES = ((1, 1, 10), (2, 1, 10), (4, 1, 10), (5, 1, 8), (7, 1, 10), (2, 2, 10), (4, 2, 10), (4, 3, 7), (5, 4, 20))
"""Stages, chunks, and the inverse of the allowed bubble."""


def rows(seed: int) -> list[tuple[str, list[int], list[int]]]:
    """Return seconds of units: those on paper, then drawn ones."""
    draw = random.Random(7 + seed)
    units = [(list(compute), list(gather)) for compute, gather in SMALL]
    for _ in range(20):
        count = draw.randint(2, 8)
        times = [[draw.choice((1, 1, 2, 3, 9)) for _ in range(count)] for _ in range(2)]
        units.append((times[0], times[1]))
    return [(f"my_depth({compute}, {gather})", compute, gather) for compute, gather in units]


def wrong_depth(asked: str, compute: list[int], gather: list[int], depth: Any) -> Wrong | None:
    """Return the error in a depth, from gathers so many units ahead by the clock."""
    waits = [waited(compute, gather, ahead) for ahead in range(len(compute))]
    right = waits.index(waits[-1])
    if type(depth) is not int or not 0 <= depth < len(compute):
        return f"{asked} is {shown(depth)}, expected a number of other units, 0 to {len(compute) - 1}", _TURN
    if depth != right:
        words = f"{asked} is {depth}, expected {right}; waits with 0, 1, ... units prefetched: "
        return words + ", ".join(f"{wait:g} s" for wait in waits), _TURN
    return None


_TURN = (
    "at a unit's turn, wait for its gather, launch the next units' gathers, then compute; gathers run one after another"
)


class OnPaper:
    """Costs of a sum on paper: a byte of a collective takes a second, and everything else no time."""

    graph = 0.0
    chunks = 1
    side_stream = False
    contention = 0.0

    def kernel(self, kernel: Kernel) -> float:
        return 0.0

    def launch(self, kernel: Kernel) -> float:
        return 0.0

    def call(self, event: Launch | Copy) -> float:
        return 0.0

    def collective(self, launch: Launch) -> float:
        return float(launch.payload_bytes)

    def copy(self, copy: Copy) -> float:
        return 0.0


def waited(compute: Sequence[int], gather: Sequence[int], ahead: int) -> float:
    """Return the seconds that compute waits for gathers if those of `ahead` units are launched ahead."""
    scope, entries, launched = Scope(0), list[Entry](), 0
    for unit, seconds in enumerate(compute):
        for end in (unit + 1, min(unit + 1 + ahead, len(gather))):
            for at in range(launched, end):
                nbytes = gather[at]
                entries.append(Launch(scope, at, "all_gather", "bf16", "states", "dp_shard", (0, 1), at, nbytes, 0, 0))
            launched = max(launched, end)
            if end == unit + 1:
                entries.append(Wait(scope, unit))
        entries.append(Busy(scope, "", float(seconds), 0, 0))
    return sum(simulate({0: entries}, [0, 0], Mesh(dp_shard=2), OnPaper()).last.exposed.values())


def pipelines(seed: int) -> list[tuple[str, int, int, Fraction]]:
    draw = random.Random(seed)
    drawn = [(draw.randint(2, 6), draw.randint(1, 3), draw.randint(5, 15)) for _ in range(3)]
    return [
        (f"my_micro_batches({stages}, {chunks}, 1/{parts})", stages, chunks, Fraction(1, parts))
        for stages, chunks, parts in ((*PIPELINES[:-3], *drawn) if seed else PIPELINES)
    ]


def wrong_micro_batches(asked: str, stages: int, chunks: int, share: Fraction, count: Any) -> Wrong | None:
    """Return the error in a number of microbatches, from the bubble counted with so many, and with the next fewer."""
    pace = stages if chunks > 1 else 1
    if type(count) is not int or not 1 <= count <= 1000 or count % pace:
        which = f"a multiple of {pace}" if pace > 1 else "at least 1"
        return f"{asked} is {shown(count)}, expected {which}, as an int", _WHOLE
    if (found := bubble_of(stages, chunks, count)) > share:
        rounds_down = bubble_of(stages, chunks, count + pace) <= share
        return f"{asked} is {count}, with a bubble of {found}", _WHOLE if rounds_down else _VM
    if count > pace and (found := bubble_of(stages, chunks, count - pace)) <= share:
        is_far = count > 2 * pace and bubble_of(stages, chunks, count - 2 * pace) <= share
        return f"{asked} is {count}; {count - pace} have a bubble of {found}", _VM if chunks > 1 or is_far else _WHOLE
    return None


_VM = "waiting over working is (p-1)/(vm): all v chunks of a stage count, and all m microbatches"


_WHOLE = "round up; for interleaved, up to a multiple of the stages. Shares are Fractions, which are exact"


def bubble_of(stages: int, chunks: int, count: int) -> Fraction:
    """Return idle slots divided by busy slots, of 1F1B or, with several chunks, interleaved."""
    order = SCHEDULES["1f1b" if chunks == 1 else "interleaved"]
    return counted_bubble(slots_of([order(stages, stage, count, chunks) for stage in range(stages)]))
