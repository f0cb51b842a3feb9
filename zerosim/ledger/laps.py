"""Jumps over what repeats: a long step's clock, lap by lap.

A spliced step (`splice.py`) repeats a cycle of entries. All ranks pause at the end of each lap, unless they wait for
each other before it. Once a lap leaves them as an earlier one did, only later, all further laps do so too: the clock
jumps over them. What it finds is equal to the last digit.

    times       all are later by the same seconds, or long over: then nothing asks for them again. A host that holds
                nothing back, and reads nothing from the device, runs ahead at a pace of its own
    rounding    between two powers of two all floats are multiples of one spacing. There a time that is later by an even
                number of spacings is rounded the same way (by an odd number, a half is not). So a jump ends before the
                next power of two
    figures     a step's parts are not times, and round on their own: each is added up over all laps, one by one
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import takewhile
from math import frexp, inf, ulp
from typing import NamedTuple

from zerosim.device.copies import CONTROL
from zerosim.device.events import Copy, Launch, Wait
from zerosim.ledger.entries import Busy
from zerosim.ledger.lines import Line
from zerosim.ledger.rank_clock import Calls, Run
from zerosim.placement.memories import DEVICE

MOST_BACK = 8
"""The most laps between two that are compared: a wave through a pipeline may take some until it comes again."""
FEWEST = 4
"""The fewest laps among which it is worth to compare."""


class _Shot(NamedTuple):
    """Every rank's state between two laps: without its times, its times (now, when the host last held the device back
    ... the host's own), and how much was added."""

    shape: list[tuple[object, ...]]
    times: list[list[float]]
    added: list[dict[str, int]]


class Laps:
    """The laps of all ranks. If ranks have different numbers of them, or use another memory, nothing is compared, and
    each rank goes on to its end."""

    def __init__(self, runs: Mapping[int, Run], calls: Calls) -> None:
        self._runs, self._left, self._shots = list(runs.values()), 0, deque[_Shot](maxlen=MOST_BACK)
        self._readers = {run: defaultdict[Line, int](int) for run in self._runs}  # of a rank's calls
        counts = {len(run.reading.laps) for run in self._runs}
        if len(counts) > 1 or max(counts) < FEWEST or not all(map(_is_on_device, self._runs)):
            return
        self._left = int(min(max(counts), *(run.may_begin for run in self._runs)))
        for run in self._runs:
            run.may_begin = 0
            launches = (entry for entry in run.reading.entries if isinstance(entry, Launch))
            ways = {(way.line, launch.group): (way, launch) for launch in launches for way in [run.way(launch)]}
            for way, launch in ways.values():
                for member, line in calls.sides(way, launch):
                    self._readers[member][line] += 1

    def next(self) -> bool:
        """Compare this lap with earlier ones, jump if it repeats one, and open the next one. False after the last."""
        if not self._left:
            return False
        for run in self._runs:
            run.forget(self._readers[run])
        shot = self._shot()
        earlier = enumerate(reversed(self._shots), 1)
        jumped = any(old.shape == shot.shape and self._jumps(old, shot, back) for back, old in earlier)
        self._shots.clear() if jumped else self._shots.append(shot)
        self._left -= 1
        for run in self._runs:
            run.may_begin += 1
        return True

    def _shot(self) -> _Shot:
        times = [run.times() for run in self._runs]
        shape = [(len(run.reading.laps) - self._left, *run.shape()) for run in self._runs]
        added = [{name: len(each) for name, each in run.added.items()} for run in self._runs]
        return _Shot(shape, times, added)

    def _jumps(self, before: _Shot, now: _Shot, back: int) -> bool:
        """Jump as far as the laps repeat for certain. Return False if they do not."""
        later, low, high = now.times[0][0] - before.times[0][0], inf, 0.0
        for run, olds, news in zip(self._runs, before.times, now.times, strict=True):
            begin = olds[0]
            if news[1] < begin and not run.reads:  # the host held nothing back
                if (news[-1] - olds[-1]) * (1 + 1e-9) >= later:
                    return False
                olds, news = olds[:-1], news[:-1]
            for old, new in zip(olds, news, strict=True):
                if new - old == later:
                    low, high = min(low, old), max(high, new)
                elif new != old or old > begin:
                    return False
        limit = 2.0 ** frexp(low)[1]
        if later <= 0 or high >= limit or later % (2 * ulp(low)):
            return False
        repeats = min(sum(1 for _ in takewhile(run.reading.current.__eq__, run.reading.laps)) for run in self._runs)
        times = min(int((limit - high) / later) - 1, repeats // back)
        if times < 1:
            return False
        for run, olds, news, added in zip(self._runs, before.times, now.times, before.added, strict=True):
            moves, host = map(float.__ne__, olds, news), run.host
            run.move(lambda time, moves=moves: time + times * later if next(moves) else time)  # type: ignore[misc]
            run.repeat(added, back, times, host)
            for _ in range(times * back):
                run.reading.laps.popleft()
        self._left -= times * back
        return True


def _is_on_device(run: Run) -> bool:
    others = (entry for entry in run.reading.entries if not isinstance(entry, (Launch, Wait)))
    return all(
        entry.place == DEVICE if isinstance(entry, Busy) else isinstance(entry, Copy) and entry.purpose == CONTROL
        for entry in others
    )
