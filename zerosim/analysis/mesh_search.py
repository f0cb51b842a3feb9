"""Find the best configurations of a space (`meshes.ladders`): by the clock or, without one, by memory.

The search evaluates a candidate in three steps of rising cost. It always continues with the candidate of the lowest
value:

- a bound: no step is shorter than its own kernels without any waiting (`estimate.least_seconds`);
- an estimate from plans of a few blocks (`estimate.estimates`);
- a plan of the whole model. The reported memory and time come from this plan.

When the best few are known, every other candidate needs longer for its kernels alone, or by its estimate. A plan whose
MFU nobody has published ranks behind all others. For one mesh, recipe, ZeRO stage and microbatch the search keeps the
least recompute that fits. It assumes, as every search here (`search.py`), that more rows and less recompute never need
less memory, and that without a pipeline more rows per microbatch are no slower: fewer are tried where more do not fit.
If some rows do not fit, it tries no more rows with the same recompute, except all rows at once, which need no sums of
gradients. Beside each of the best it tries schedules, overlap, replicas, ZeRO stage 0, whole rows and other
ways to share rows and experts. Rows are cut over more ranks where one row fits with no recompute, and beside the best
in place of recompute.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from zerosim.analysis.candidate import accepted, candidate, with_micro_batches
from zerosim.analysis.capabilities import paging, pipeline
from zerosim.analysis.estimate import Bounds, estimates
from zerosim.analysis.meshes import beside, ladder, wider
from zerosim.analysis.search import Devices, Tried
from zerosim.config import RunConfig
from zerosim.errors import InputError
from zerosim.train.plan import Figures

MOST = 3
MOST_WORK = 400
"""After the best one, whole plans of this much `_work` together are made."""
NEAR = 0.01
"""How near an estimate is to its whole plan."""
BOUND, ESTIMATE, PLAN = 0, 1, 2
NODE = 8
"""GPUs per node, if not given."""
Say = Callable[[RunConfig, Tried | None], None]


class Group(NamedTuple):
    """What a search found out about the ways of one recipe and ZeRO stage with the same cuts: how many there are and
    how many needed too much memory, and the least seconds of an estimate or a plan (None: none was needed)."""

    recipe: str
    stage: int
    cuts: tuple[str, ...]
    ways: int
    too_much: int
    seconds: float | None


class Known:
    """Bounds and estimates of a model's configurations on some devices. Several searches may share them."""

    def __init__(self, config: RunConfig, devices: Devices) -> None:
        self.devices, self.least = devices, Bounds(config, devices.cluster)
        each = self.least.numel // max(1, config.model.layers)
        self.estimate = estimates(self._unlimited, each, has_clock=devices.cluster is not None)

    def _unlimited(self, asked: RunConfig) -> Figures:
        """Return a step's figures on devices without a limit. Of paged states only the limit tells."""
        tried = self.devices.without_limit().within(candidate(asked, host_memory=None, paged_states=None).sure())
        assert tried is not None
        return Figures(0 if paging.is_on(asked) else tried.peak_bytes, 0, tried.time)


@dataclass(frozen=True, slots=True)
class Meshes:
    """The answers, best first; what was found out about each group of ways; the number of ways to cut model and batch,
    of estimated configurations, of whole plans, and of those that did not fit. `ended`: False if the search was
    stopped, so there may be better ones. `beyond`: the fastest plan whose MFU is above any that was published."""

    found: Sequence[Tried]
    groups: Sequence[Group] = ()
    candidates: int = 0
    estimated: int = 0
    planned: int = 0
    too_much: int = 0
    ended: bool = True
    beyond: Tried | None = None


class Stopped(Exception):
    """The time limit is over."""


def best_meshes(
    config: RunConfig,
    families: Iterable[Sequence[RunConfig]],
    devices: Devices,
    *,
    node: int = NODE,
    check_time: Callable[[], None] = lambda: None,
    say: Say = lambda config, tried: None,
    most: int = MOST,
    known: Known | None = None,
    allowed: Callable[[RunConfig], bool] = lambda config: True,
) -> Meshes:
    """Find the best of these families, each a configuration with ever more recompute, and of what is tried beside them.
    `check_time` raises Stopped when time is up; `known` are bounds and estimates of an earlier search. What
    is tried beside a family, or in its place, is `allowed`.

    Raises: InputError if no candidate can be planned; KeyboardInterrupt before the first answer. Later an interrupt
    ends the search with the answers so far.
    """
    known = known or Known(config, devices)
    search = _Search(known, [list(family) for family in families], devices, node, say, most, allowed)
    ended = interrupted = False
    try:
        while search.goes_on():
            check_time()
            search.step()
        ended = True
    except Stopped:
        pass
    except KeyboardInterrupt:  # handled below: there another one ends the search at once
        interrupted = True
    if not ended:
        search.plan_best_estimate()
        if not search.found and interrupted:
            raise KeyboardInterrupt
    if search.refusal is not None and not search.estimated and not search.planned:
        raise search.refusal
    too_much = [*search.estimated, *search.planned].count(False)
    counts = len(search.families), len(search.estimated), len(search.planned), too_much
    return Meshes(search.found, search.groups(), *counts, ended, search.beyond)


class _Search:
    """The state of a search: `waiting` candidates by value, and what is known of each."""

    def __init__(
        self,
        known: Known,
        families: list[list[RunConfig]],
        devices: Devices,
        node: int,
        say: Say,
        most: int,
        allowed: Callable[[RunConfig], bool],
    ) -> None:
        self.families, self.devices, self.node, self.say, self.most = families, devices, node, say, most
        self.allowed = allowed
        self.least, self.estimate = known.least, known.estimate
        self.found: list[Tried] = []
        self.estimated: list[bool] = []
        self.planned: list[bool] = []
        self.work, self.error = 0, dict[tuple[object, ...], float]()
        self.beyond: Tried | None = None
        self.refusal: InputError | None = None
        self.too_much: set[int] = set()  # families, and the least seconds that were found for the others
        self.seconds: dict[int, float] = {}
        self.refused: dict[RunConfig, int] = {}  # by `_one_row`: the smallest number of rows that does not fit
        self.seen, self.beside = {family[0] for family in families}, set[int]()
        self.waiting: list[tuple[tuple[float, int], int, int, int]] = []
        self.fewer: dict[int, int] = {}  # by family: the one with the next fewer rows, which is tried if it is too much
        by_rows = dict[RunConfig, int]()
        for number in sorted(range(len(families)), key=lambda number: -families[number][0].data.micro_batch):
            first = families[number][0]
            if first.mesh.pp == 1 and (more := by_rows.get(_one_row(first))) is not None:
                self.fewer[more] = number
            else:
                self.push(number, 0)
            by_rows[_one_row(first)] = number

    def push(self, number: int, level: int) -> None:
        """Let a candidate wait, with the lower bound of its seconds."""
        heapq.heappush(self.waiting, ((self.least.seconds(self.families[number][level]), 0), BOUND, number, level))

    def goes_on(self) -> bool:
        """Return whether a waiting candidate may still be better than the worst answer, or than the best one if a
        further answer would take long to plan."""
        if not self.waiting or not self.found or self.devices.is_implausible(self.found[0]):
            return bool(self.waiting)
        value, what, number, level = self.waiting[0]
        asked = self.families[number][level]
        if value[0] * self.error.get(_kind(asked), 1.0) < (1 - NEAR) * self.found[0].order[0]:
            return True
        if len(self.found) == self.most and value >= self.found[-1].order:
            return False
        return what != PLAN or self.work + _work(asked) <= MOST_WORK

    def step(self) -> None:
        """Go on with the candidate of the lowest value."""
        _, what, number, level = heapq.heappop(self.waiting)
        try:
            is_done = self.ask(what, number, level)
        except InputError as error:  # a plan of it would take far too long, for one
            self.refusal, is_done = self.refusal or error, False
        if not is_done:
            self.next_of(number, level)

    def ask(self, what: int, number: int, level: int) -> bool:
        """Return False if a candidate needs too much memory."""
        asked = self.families[number][level]
        if what == BOUND:
            if (guess := self.guessed(asked)) is None:
                return False
            self.seconds[number] = guess[0]
            least = guess[0] * (1.0 if number in self.beside else _without_bubble(asked))  # for other schedules
            heapq.heappush(self.waiting, ((least, guess[1]), ESTIMATE, number, level))
            return True
        if what == ESTIMATE:
            for other in filter(self.allowed, beside(asked, self.node)):  # before a whole plan, which takes long
                self.add(ladder(other), beside=True)
            heapq.heappush(self.waiting, (self.estimate(asked), PLAN, number, level))
            return True
        if any(one.config == asked for one in self.found):  # a change of another one led here too
            return True
        fastest = 0.0 if self.beyond is None else self.devices.least_plausible(self.beyond)  # FLOPs are all plans'
        if self.estimate(asked)[0] < (1 - 2 * NEAR) * fastest:  # one plan beyond what was published is enough
            return True
        if not self.whole(asked):
            self.refuse(asked)
            self.seconds.pop(number, None)
            return False
        return True

    def guessed(self, asked: RunConfig) -> tuple[float, int] | None:
        """Return a candidate's estimate; None if it does not fit."""
        rows = asked.data.micro_batch
        if asked.data.accumulate > 1 and rows >= self.refused.get(_one_row(asked), rows + 1):
            return None
        if self.least.nbytes(asked) > self.devices.room(asked):
            return None
        value = self.estimate(asked)
        self.estimated.append(value[1] <= self.devices.room(asked))
        if not self.estimated[-1]:
            self.refuse(asked)
        return value if self.estimated[-1] else None

    def refuse(self, asked: RunConfig) -> None:
        if asked.data.accumulate > 1:
            one, rows = _one_row(asked), asked.data.micro_batch
            self.refused[one] = min(rows, self.refused.get(one, rows))

    def whole(self, asked: RunConfig) -> bool:
        tried = self.devices.within(asked)
        self.say(asked, tried)
        self.planned.append(tried is not None)
        self.work += 0 if tried is None else _work(asked)
        if tried is not None:
            guess, took = self.estimate(asked), tried.order
            if guess[0]:  # what an estimate is short of, others of its kind are short of too
                self.error[_kind(asked)] = max(1.0, took[0] / guess[0])
            if self.devices.is_implausible(tried) and (not self.beyond or tried.order < self.beyond.order):
                self.beyond = tried
            self.found.append(tried)
            self.found.sort(key=lambda one: (self.devices.is_implausible(one), one.order))
            del self.found[self.most :]
        return tried is not None

    def add(self, family: list[RunConfig], *, beside: bool = False) -> None:
        if family and family[0] not in self.seen:
            self.seen.add(family[0])
            self.families.append(family)
            if beside:  # of one whose rows are cut as needed
                self.beside.add(len(self.families) - 1)
            self.push(len(self.families) - 1, 0)

    def next_of(self, number: int, level: int) -> None:
        """Add the candidate with more recompute, if that may help; else one whose rows are cut over more ranks."""
        family = self.families[number]
        smallest = _one_row(family[-1])
        if not level and number in self.fewer:
            self.push(self.fewer[number], 0)
        if level + 1 < len(family) and self.least.nbytes(smallest) <= self.devices.room(smallest):
            self.push(number, level + 1)
            return
        self.too_much.add(number)
        if number not in self.beside:
            data = family[0].data
            row = candidate(family[0], micro_batch=1, accumulate=data.micro_batch * data.accumulate)
            cuts = filter(self.allowed, chain.from_iterable(map(wider, accepted([row]))))
            for cut in islice(cuts, 1):
                self.add(ladder(cut))

    def groups(self) -> list[Group]:
        """Return what was found out, by recipe, ZeRO stage and cuts."""
        found: dict[tuple[str, int, tuple[str, ...]], list[int]] = {}
        for number, (first, *_) in enumerate(self.families):
            mesh, parallel = first.mesh.axes, first.parallel
            cuts = tuple(axis for axis in ("tp", "cp", "pp", "ep") if mesh.size(axis) > 1)
            found.setdefault((parallel.recipe, parallel.zero_stage, cuts), []).append(number)
        return [
            Group(
                *key,
                len(numbers),
                len([number for number in numbers if number in self.too_much and number not in self.seconds]),
                min((self.seconds[number] for number in numbers if number in self.seconds), default=None),
            )
            for key, numbers in found.items()
        ]

    def plan_best_estimate(self) -> None:
        """Plan the candidate of the lowest estimate, if there is no answer yet."""
        for _, what, number, level in sorted(self.waiting) if not self.found else ():
            if what != BOUND and not self.found:
                self.whole(self.families[number][level])


def _one_row(asked: RunConfig) -> RunConfig:
    """Return the configuration with one row per microbatch, and as few as the schedule allows: more rows never take
    less memory."""
    return with_micro_batches(asked, micro_batch=1).config or asked


def _without_bubble(config: RunConfig) -> float:
    """Return the part of a step that a schedule without a bubble would take."""
    batches = config.data.accumulate
    return batches / (batches + config.mesh.pp - 1)


def _kind(config: RunConfig) -> tuple[object, ...]:
    """Return what the error of an estimate depends on: the schedule, and whether ranks share rows."""
    return pipeline.schedule_name(config), config.mesh.cp > 1, config.parallel.recipe


def _work(config: RunConfig) -> int:
    """Return how many passes of a chunk a whole plan runs and times, per pipeline stage and rank that shares rows."""
    mesh = config.mesh
    return mesh.pp * config.chunks.each * min(config.data.accumulate, 4 * mesh.pp) * mesh.cp
