"""A plan for many microbatches out of two short ones.

In a long step most microbatches are alike. One more adds its loss to 1F1B's memory, all of its saved activations to
GPipe's, and the same traffic to both. Every figure of a moment grows by a constant. So plan just enough microbatches
for all that differ (at the beginning and at the end of the schedule), then one period more, and extrapolate the rest.
The clock reads a pipeline's step of all microbatches, spliced from the two (`ledger/splice.py`). An allocator that is
not exact serves all of its requests, spliced too (`ledger/requests.py`).

The schedule's action list gives the numbers (`Steady`): p + 1 and p + 2 under 1F1B, 3p and 4p interleaved (plus the
remainder of a smaller last group). Without a pipeline plan 3 and 4: the first microbatch fills gradient buffers, the
second still meets the first one's collectives in flight, and the third is like every later one. With offload plan one
more, because gradient sums return from another memory from the second microbatch on.

Another moment may be the highest when microbatches are many: under GPipe the optimizer's step with 3, a backward with
128. So the line of every moment is extended, and the peak is the highest of them. A moment of an early microbatch has
the same number in both plans, a moment of a late one the same distance to the last microbatch. A microbatch in between
is no higher than the two at its ends. If the two plans contradict this, longer ones are tried, and finally all
microbatches.

Source: derived from the schedules (`parallel/pipeline.py`); tests hold it against plans of all microbatches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from zerosim.config import RunConfig
from zerosim.config.parts.allocators import is_exact, shares_with_pages
from zerosim.device.device import Phase
from zerosim.errors import OutOfMemory
from zerosim.ledger.clock import StepTime
from zerosim.ledger.entries import Entries
from zerosim.ledger.memory import Moment, Snapshot
from zerosim.ledger.requests import Refused, RequestLedger, Requests, laps_of, serve
from zerosim.ledger.saving import SaveCounts
from zerosim.ledger.splice import Spliced, spliced
from zerosim.ledger.traffic import TrafficRow
from zerosim.parallel.pipeline import schedule_of
from zerosim.parallel.schedule import Forward, live
from zerosim.placement.memories import HOST
from zerosim.train.memory import OtherMemory, RankMemory
from zerosim.train.offload import moves_states
from zerosim.train.result import RunResult
from zerosim.train.world import new_allocator

Key = TypeVar("Key")
COUNTS = ("calls", "payload_bytes", "sent_bytes", "received_bytes", "modelled_bytes")
"""The fields of a traffic row that grow."""
SECONDS, WORK = (
    ("seconds", "compute", "slowed", "bubble", "host", "copies", "cpu"),
    ("kernels", "hardware_flops", "model_flops"),
)
"""The fields of a step's time that grow, beside the exposed times."""


class Steady(NamedTuple):
    """The steady state of a pipeline's schedule, read off its action list: the fewest microbatches with all its phases;
    a period; the microbatches whose forwards or backwards differ from later ones; whether a longer step has more of
    them live."""

    few: int
    period: int
    forwards: int
    backwards: int
    grows: bool


def steady(config: RunConfig) -> Steady:
    """Find the steady state. An action equals that of the microbatch one period later if the same action comes before
    it, at the same distance, after all chunks have gradients. The first and the last pipeline stage have the most
    actions that differ."""
    chunks, order = config.chunks, schedule_of(_in_groups(config).parallel)
    pp, period = chunks.stages, config.micro_batch_group
    later = int(moves_states(config))  # the second microbatch is unlike the first
    if pp == 1:
        return Steady(3 + later, 1, 1 + later, 1 + later, grows=False)
    rest = config.data.accumulate % period  # the last group's microbatches
    count, few, ends = 8 * max(pp, period) + rest, max(pp, 2) + 1, {True: 0, False: 0}
    first = {True: 1 + later, False: 1 + later}
    for stage in {0, pp - 1}:
        actions, before = order(pp, stage, count, chunks.each), dict[tuple[str, int], list[object]]()
        for last, action in pairwise([None, *actions]):
            assert action is not None
            of = before.setdefault((action.letter, action.chunk), [])
            of.append(last and (last.letter, last.chunk, last.slot - action.slot))
        done = {action.chunk: at for at, action in reversed(list(enumerate(actions))) if action.completes}
        early = Counter((action.letter, action.chunk) for action in actions[: max(done.values()) + 1])
        for (letter, chunk), found in before.items():
            unlike = [slot for slot in range(count - period) if found[slot] != found[slot + period]]
            is_forward = letter == Forward.letter
            front = max((slot + 1 for slot in unlike if slot < count // 2), default=0) + (not is_forward)
            front = max(front, early[letter, chunk] % count)  # all of GPipe's forwards come first
            back = max((count - period - slot for slot in unlike if slot >= count // 2), default=0)
            few = max(few, period * (-(-(front + back) // period) + 1))
            first[is_forward] = max(first[is_forward], -(-front // period) * period)
            ends[is_forward] = max(ends[is_forward], -(-back // period) * period)
    few = max(few, *(first[way] + ends[way] for way in first))
    few += (rest - few) % period + later * period
    longer = (live(order(pp, 0, times * (count - rest) + rest, chunks.each)) for times in (1, 2))
    grows = len({max(counts.total for counts in of) for of in longer}) > 1
    return Steady(few, period, first[True], first[False], grows)


def _in_groups(config: RunConfig) -> RunConfig:
    """Return the configuration with its group size fixed: fewer microbatches might have another smallest group."""
    group = config.micro_batch_group
    return config if group in (1, config.mesh.pp) else config.replace(micro_batch_group=group)


def shorter_runs(config: RunConfig) -> Iterator[tuple[int, int]]:
    """Yield pairs of microbatch counts to plan in place of `accumulate`, shortest first."""
    wanted, (few, step, *_) = config.data.accumulate, steady(config)
    # The bytes of a device with such pages need not grow by a constant.
    while not shares_with_pages(config.memory) and wanted > few + step:
        yield few, few + step
        few += few - wanted % step


def shortest(config: RunConfig) -> RunConfig:
    """Return the configuration with the fewest microbatches that stand for its own number."""
    counts = next(shorter_runs(config), None)
    return config if counts is None else _in_groups(config).replace(accumulate=counts[0])


class Planned(NamedTuple):
    """A plan without its time, and what the clock reads for that: by rank the entries of the timed step. `requests`:
    of a short plan, each rank's requests to an allocator that is not exact. `saves`: of a plan that saves, what each
    rank's save took."""

    result: RunResult
    entries: Mapping[int, Entries]
    requests: Mapping[int, Requests] = MappingProxyType({})
    saves: Mapping[int, SaveCounts] = MappingProxyType({})


def from_short_plans(
    config: RunConfig,
    planned: Callable[[RunConfig], Planned],
    time_of: Callable[[Planned], StepTime | None],
    capacities: Mapping[str, int | None],
) -> RunResult | None:
    """Return the result for `config` from plans of fewer microbatches; None if all have to be planned.

    That is so if a memory runs out, of which `capacities` has the limit: only a plan of all microbatches says where.

    Raises: OutOfMemory; Refused, if an allocator that is not exact refuses a request.
    """
    for counts in shorter_runs(config):
        try:
            few, more = (planned(_in_groups(config).replace(accumulate=count)) for count in counts)
        except OutOfMemory:
            if is_exact(config.memory) and not steady(config).grows:
                raise
            return None  # more live microbatches may be refused at an earlier moment
        if (result := extended(config, few.result, more.result)) is None:
            continue
        for memory, capacity in capacities.items():
            if capacity is not None and max(held.peak_bytes(memory) for held in result.memory) > capacity:
                return None
        if not is_exact(config.memory):
            if (served := _served(result, few, more)) is None:
                continue
            if any(ledger.refuses for ledger in served.values()):
                raise Refused
            held = {
                rank: replace(result.memory[rank], allocator=one.peaks, allocator_marks=one.marks)
                for rank, one in served.items()
            }
            result = replace(result, memory=[held[rank] for rank in result.stands_for])
        if _is_linear(config):
            first, second = time_of(few), time_of(more)
            times = (config.data.accumulate - counts[1]) / (counts[1] - counts[0])
            return replace(result, time=extrapolated(first, second, times) if first and second else None)
        if (long := _long_step(config, few, more)) is not None:
            return replace(result, time=time_of(Planned(result, long)))
    return None


def _is_linear(config: RunConfig) -> bool:
    """Return whether each further microbatch takes as long as the last one of the short plans. Without a pipeline it
    does, unless states return from another memory."""
    return config.mesh.pp == 1 and not moves_states(config)


def _served(result: RunResult, few: Planned, more: Planned) -> dict[int, RequestLedger] | None:
    """Serve every rank's requests of the extended plan; None if a rank of the short ones has no cycle."""
    had, has = few.result.config.data.accumulate, more.result.config.data.accumulate
    times, found = (result.config.data.accumulate - has) // (has - had), dict[int, RequestLedger]()
    for rank in more.requests:
        if (laps := laps_of(few.requests[rank], more.requests[rank], has - had, times)) is None:
            return None
        found[rank] = serve(laps, new_allocator(result.config))
    return found


def _long_step(config: RunConfig, few: Planned, more: Planned) -> dict[int, Spliced] | None:
    """Return every rank's entries of a step of `config`; None if a rank of the short ones has no cycle."""
    had, has = few.result.config.data.accumulate, more.result.config.data.accumulate
    times, found = (config.data.accumulate - has) // (has - had), dict[int, Spliced]()
    for rank in more.entries:
        if (entries := spliced(few.entries[rank], more.entries[rank], times)) is None:
            return None
        found[rank] = entries
    return found


def extended(config: RunConfig, few: RunResult, more: RunResult) -> RunResult | None:
    """Extend two plans, which differ only in their number of microbatches, to the number of `config`.

    Return None if they do not determine a peak.
    """
    had, has = few.config.data.accumulate, more.config.data.accumulate
    steps, rest, unlike = has - had, config.data.accumulate - has, steady(config)

    def grown(first: int, second: int) -> int:
        growth, left = divmod((second - first) * rest, steps)
        assert left == 0, "microbatches add unequal amounts"
        return second + growth

    def counts(first: Mapping[Key, int], second: Mapping[Key, int]) -> dict[Key, int]:
        return {key: grown(first.get(key, 0), nbytes) for key, nbytes in second.items()}

    def snapshot(first: Snapshot, second: Snapshot) -> Snapshot:
        return Snapshot(
            second.scope._replace(slot=grown(first.scope.slot, second.scope.slot)),
            counts(first.by_kind, second.by_kind),
            counts(first.by_unit, second.by_unit),
            counts(first.padding, second.padding),
        )

    def peak(first: RankMemory | OtherMemory, second: RankMemory | OtherMemory) -> Snapshot | None:
        pairs = [(shot, second.moments.get(_twin(at, unlike, steps))) for at, shot in first.moments.items()]
        lines = [(before, after) for before, after in pairs if after is not None]
        if len(lines) < len(pairs) or max(after.total_bytes for _, after in lines) < second.peak.total_bytes:
            return None
        before, after = max(lines, key=lambda line: grown(line[0].total_bytes, line[1].total_bytes))
        same = before.scope.unit == after.scope.unit and before.by_unit.keys() == after.by_unit.keys()
        return snapshot(before, after) if same else None

    def marks(first: Mapping[str, Snapshot], second: Mapping[str, Snapshot]) -> dict[str, Snapshot]:
        return {name: snapshot(first[name], mark) for name, mark in second.items()}

    def others(first: RankMemory, second: RankMemory) -> dict[str, OtherMemory] | None:
        found = dict[str, OtherMemory]()
        for name, held in second.others.items():
            if (highest := peak(first.others[name], held)) is None:
                return None
            found[name] = OtherMemory(marks(first.others[name].marks, held.marks), highest)
        return found

    def memory(first: RankMemory, second: RankMemory) -> RankMemory | None:
        highest, away = peak(first, second), others(first, second)
        if highest is None or away is None:
            return None
        host = away[HOST].peak.total_bytes if HOST in away else grown(first.host_peak_bytes, second.host_peak_bytes)
        begun = max(
            grown(shot.total_bytes, second.moments[_twin(at, unlike, steps)].total_bytes)
            for at, shot in first.moments.items()
            if at.step <= 0 and not at.phase.startswith(Phase.CURVATURE)  # which is estimated after the step
        )
        of_marks = marks(first.marks, second.marks)
        return RankMemory(
            of_marks,
            highest,
            second.pool,
            host_peak_bytes=host,
            states=second.states,
            first_step_bytes=begun,
            others=away,
        )

    def traffic(first: list[TrafficRow], second: list[TrafficRow]) -> list[TrafficRow]:
        rows = []
        for old, new in zip(first, second, strict=True):
            counts: dict[str, Any] = {name: _either(grown, getattr(old, name), getattr(new, name)) for name in COUNTS}
            rows.append(new._replace(**counts))
        return rows

    memories = dict[int, RankMemory]()
    for rank in more.ran:
        if (found := memory(few.memory[rank], more.memory[rank])) is None:
            return None
        memories[rank] = found
    rows = {rank: traffic(few.traffic[rank], more.traffic[rank]) for rank in more.ran}
    return replace(
        more,
        config=config,
        memory=[memories[rank] for rank in more.stands_for],
        traffic=[rows[rank] for rank in more.stands_for],
        extended_from=(had, has),
    )


def _twin(moment: Moment, unlike: Steady, steps: int) -> Moment:
    """Find a moment of a short plan in one with `steps` more microbatches, by its number from the first, or from the
    last.

    Forwards and backwards of the first microbatches differ from later ones. The last ones begin after them."""
    is_forward = moment.phase in (Phase.FORWARD, Phase.CURVATURE_FORWARD)
    first = unlike.forwards if is_forward else unlike.backwards
    return moment if moment.slot < first else moment._replace(slot=moment.slot + steps)


def extrapolated(few: StepTime, more: StepTime, times: float) -> StepTime:
    """Extrapolate linearly: more + times * (more - few). `times` may be negative. In a long pipeline each
    microbatch takes as long as the one before it."""

    def grown(first: float, second: float) -> float:
        return second + (second - first) * times

    axes = sorted(more.exposed.keys() | few.exposed.keys())
    exposed = {axis: grown(few.exposed.get(axis, 0.0), more.exposed.get(axis, 0.0)) for axis in axes}
    figures: dict[str, Any] = {name: grown(getattr(few, name), getattr(more, name)) for name in SECONDS + WORK}
    figures |= {name: round(figures[name]) for name in WORK}
    return more._replace(exposed=exposed, **figures)


def _either(grown: Callable[[int, int], int], first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else grown(first, second)
