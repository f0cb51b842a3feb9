"""Collectives that a run leaves out: which hook lacks them, and what the ranks use instead.

A missing gather of a unit has two simple causes. Its buffer was never freed, so it is still live; or no rank gathers,
and the ranks use what they have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from zerosim.device.events import Alloc, Event, Free
from zerosim.grading.record import Call, Where, calls, where
from zerosim.grading.trial import Trial
from zerosim.units import few

HOOKS = {
    ("forward", "all_gather"): "pre_forward",
    ("backward", "all_gather"): "pre_backward",
    ("backward", "reduce_scatter"): "post_backward",
    ("backward", "all_reduce"): "post_backward",
    ("optimizer", "all_gather"): "publish_params",
}
_WITHOUT = {
    "publish_params": (
        "after the update a rank has new values only in its local slice: publish_params must gather all slices"
    ),
    "post_backward": "without it the gradient covers only this rank's batch: reduce it over all ranks",
}
_RESHARD = (
    "a unit's buffer stays until you call flat.reshard() and no name of yours holds it: free it in "
    "post_forward and post_backward, and gather it again before the next use"
)


class Missing(NamedTuple):
    """One hook's collectives of a step that the reference calls and a rank does not.

    kept   units whose gathered buffers are still live from before, so that nothing had to be gathered
    """

    rank: int
    step: int
    hook: str
    op: str
    lacking: int
    of: int
    kept: tuple[str, ...]
    where: Where

    @property
    def words(self) -> str:
        words = f"{self.hook} calls {self.op} {self.of - self.lacking} of {self.of} times in step {self.step}"
        if self.lacking == self.of:
            words = f"{self.hook} calls no {self.op} in step {self.step}, where the reference calls {self.of}"
        if self.kept:
            words += f": {few(self.kept)} {'is' if len(self.kept) == 1 else 'are'} still gathered from before"
        return words

    @property
    def hint(self) -> str:
        return _RESHARD if self.kept else _WITHOUT.get(self.hook, "")

    @property
    def is_publishing(self) -> bool:
        return self.hook == "publish_params"


def first_missing(mine: Trial, reference: Trial, rank: int = 0) -> Missing | None:
    """Return the first hook that leaves out collectives. None if none is missing: another op replaces them, or another
    phase of the step has as many."""
    ours, theirs = (_by_hook(calls(trial.records[rank])) for trial in (mine, reference))
    for (step, phase, op), wanted in theirs.items():
        called = ours.get((step, phase, op), [])
        hook = HOOKS.get((phase, op))
        in_step = [sum(len(found[key]) for key in found if (key[0], key[2]) == (step, op)) for found in (ours, theirs)]
        others = {key[2] for key in ours if key[:2] == (step, phase)} - {
            key[2] for key in theirs if key[:2] == (step, phase)
        }
        if hook is None or others or len(called) >= len(wanted) or in_step[0] >= in_step[1]:
            continue
        left = Counter((call.what[2], call.what[5]) for call in wanted)
        left.subtract((call.what[2], call.what[5]) for call in called)
        units = [call.what[2] for call in wanted if left[call.what[2], call.what[5]] > 0]
        kept, number = _kept(mine.records[rank], step, phase, units) if phase != "optimizer" else ((), None)
        number = _end_of(mine.records[rank], step, phase) if number is None else number
        at = where(rank, mine.records[rank], number).only("unsharded_param" if kept else "")
        return Missing(rank, step, hook, op, len(wanted) - len(called), len(wanted), kept, at)
    return None


def _by_hook(called: Sequence[Call]) -> dict[tuple[int, str, str], list[Call]]:
    found: dict[tuple[int, str, str], list[Call]] = {}
    for call in called:
        found.setdefault((call.what[0], call.what[1], call.op), []).append(call)
    return found


def _kept(record: Sequence[Event], step: int, phase: str, units: Sequence[str]) -> tuple[tuple[str, ...], int | None]:
    """Return the units whose gathered buffer is still live when they are used in a phase; and the first such event."""
    live, begun, kept, first = dict[int, Alloc](), set[str](), list[str](), None
    for number, event in enumerate(record):
        unit, here = event.scope.unit, event.scope[:2] == (step, phase)
        if here and unit in units and unit not in begun:
            begun.add(unit)
            if any(alloc.kind == "unsharded_param" and alloc.scope.unit == unit for alloc in live.values()):
                kept.append(unit)
                first = number if first is None else first
        if isinstance(event, Alloc):
            live[event.id] = event
        elif isinstance(event, Free):
            live.pop(event.id, None)
    return tuple(kept), first


def _end_of(record: Sequence[Event], step: int, phase: str) -> int:
    """Return the last event of a phase; if the phase never came, the last of the record."""
    numbers = [number for number, event in enumerate(record) if event.scope[:2] == (step, phase)]
    return numbers[-1] if numbers else len(record) - 1
