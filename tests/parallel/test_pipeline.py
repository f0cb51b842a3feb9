"""Schedules of pipelines: what each list promises, that none gets stuck, what is live meanwhile and how long one waits.

p stages, m microbatches, v chunks of layers on each rank; stage i from 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Any

import pytest

from zerosim.config import RunConfig
from zerosim.config.parts.parallel import ParallelConfig
from zerosim.device.events import Event, Free, Save
from zerosim.errors import Deadlock, InputError, Mismatch
from zerosim.parallel.pipeline import BACKWARD, FORWARD, SCHEDULES, interleaved, received_early
from zerosim.parallel.schedule import Action, Backward, Forward, InputGrad, Live, WeightGrad, live
from zerosim.placement.stages import Chunks, fits_group, smallest_group
from zerosim.stepper import debug
from zerosim.train.plan import plan
from zerosim.train.run import run

KINDS = list(SCHEDULES)
APART = ("zb-h1", "zb-v")
"""Input gradients first, weight gradients later."""


def sizes(kind: str, stages: Sequence[int], slots: Sequence[int], chunks: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """(p, m, v) that a schedule takes."""
    for p in stages:
        fewest = ParallelConfig(pipeline=kind).fewest_micro_batches(p)
        for m in slots:
            if m >= fewest:
                yield from ((p, m, v) for v in {"interleaved": chunks, "zb-v": (2,)}.get(kind, (1,)))


def lists(kind: str, p: int, m: int, v: int = 1) -> list[list[Action]]:
    return [SCHEDULES[kind](p, stage, m, v) for stage in range(p)]


def chunks_of(kind: str, p: int, v: int) -> Chunks:
    return Chunks(p, v, turns_back=kind == "zb-v")


def expected_peak(kind: str, p: int, stage: int, m: int, v: int) -> Live:
    """The most microbatches (of chunks) that are live, whole and with what their weight gradients read."""
    if kind == "gpipe":
        return Live(m, 0)
    if kind == "1f1b":
        return Live(min(m, p - stage), 0)
    if kind == "zb-h1":
        return Live(p - stage, stage)
    if kind == "zb-v":
        return Live(2 * p, 0)
    return Live(min(m * v, 2 * (p - stage - 1) + (v - 1) * smallest_group(p, m) + 1), 0)


# -- the lists ------------------------------------------------------------------------------------------
@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_each_slot_and_chunk_goes_forward_and_then_backward_once(kind: str) -> None:
    ways = (Forward, InputGrad, WeightGrad) if kind in APART else (Forward, Backward)
    for p, m, v in sizes(kind, range(2, 9), range(1, 25), (1, 2, 3, 4)):
        for stage, actions in enumerate(lists(kind, p, m, v)):
            assert len(actions) == len(set(actions)) == len(ways) * m * v
            place = {action: at for at, action in enumerate(actions)}
            for chunk in range(v):
                turns = [[place[way(slot, chunk)] for slot in range(m)] for way in ways]
                for turn in turns:
                    assert turn == sorted(turn)  # each in microbatch order
                for one, other in pairwise(turns):
                    assert all(there < back for there, back in zip(one, other, strict=True))
            peak = expected_peak(kind, p, stage, m, v)
            assert max(live(actions), key=lambda counts: (counts.total, counts.whole)) == peak
            assert live(actions)[-1] == (0, 0)


def schedule_table(micro_batches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """Megatron-Core's get_schedule_table: microbatch and chunk of each forward."""
    table = []
    for first in range(0, micro_batches, group):
        last = min(first + group, micro_batches)
        table += [(slot, chunk) for chunk in range(chunks) for slot in range(first, last)]
    return table


def test_interleaved_groups_are_megatrons() -> None:
    """Its order of forwards and backwards, and its warm-up, for every size of groups that it takes; the bubble is that
    of groups of p."""
    for p, m, v in product((2, 3, 4), range(2, 17), (2, 3)):
        groups = [group for group in range(1, m + 2) if p <= group <= m and (m % group == 0 or m % group >= p)]
        assert groups == [group for group in range(1, m + 2) if fits_group(group, p, m)]
        for group in groups:
            lists, table = [interleaved(p, stage, m, v, group) for stage in range(p)], schedule_table(m, v, group)
            for stage, actions in enumerate(lists):
                ways = [[action for action in actions if isinstance(action, kind)] for kind in (Forward, Backward)]
                assert [(action.slot, action.chunk) for action in ways[0]] == table
                assert [(action.slot, v - 1 - action.chunk) for action in ways[1]] == table
                warm_up = min(2 * (p - stage - 1) + (v - 1) * group, m * v)
                assert [isinstance(action, Forward) for action in actions[: warm_up + 2]] == (
                    [True] * (warm_up + 1) + [False] if warm_up < m * v else [True] * warm_up + [False] * 2
                )
            ends = played(lists, Chunks(p, v), EQUAL)
            assert ends is not None
            assert max(ends) == 2 * m * v + 2 * (p - 1)


def test_groups_are_pytorchs_where_pytorch_takes_so_many() -> None:
    """Of 2.13's ScheduleInterleaved1F1B: rounds of m // (m // p), where m // p divides m."""
    for p, m in product(range(2, 9), range(2, 65)):
        if m >= p and m % (m // p) == 0:
            assert smallest_group(p, m) == m // (m // p)


def test_first_stages_of_an_interleaved_pipeline_hold_most() -> None:
    """pv + p - 1 chunks from 2p microbatches on: L (1 + (p-1)/(pv)) layers."""
    for p, m, v in sizes("interleaved", range(2, 9), range(4, 25), (2, 3, 4)):
        if m >= 2 * p and m % p == 0:
            assert max(live(lists("interleaved", p, m, v)[0])) == (p * v + p - 1, 0)


# -- a run of the lists ---------------------------------------------------------------------------------
Cost = Mapping[type[Action], int]
"""Slots that each action of a chunk takes."""
EQUAL: Cost = {Forward: 1, Backward: 1, InputGrad: 1, WeightGrad: 1}
TWICE: Cost = {Forward: 1, Backward: 2, InputGrad: 1, WeightGrad: 1}


def played(programs: Sequence[Sequence[Action]], chunks: Chunks | None = None, cost: Cost = TWICE) -> list[int] | None:
    """When each stage ends, by the executor's rule; None where they get stuck.

    Each action begins to receive what comes early, receives, computes, waits until what it sent to that stage in this
    direction before has arrived, and sends.
    """
    p, clock = len(programs), [0] * len(programs)
    steps = [_steps(stage, chunks or Chunks(p), actions, cost) for stage, actions in enumerate(programs)]
    todo = [next(each, None) for each in steps]
    sends: dict[tuple[int, int, int], list[tuple[int, Any]]] = {}  # (from, to, direction): when each was sent, and what
    posted: dict[tuple[int, int, int], list[tuple[int, Any]]] = {}  # when the receiver was ready for it, and for what
    moved = True

    def arrives(key: tuple[int, int, int], at: int) -> int:
        (sent, what), (ready, expected) = sends[key][at], posted[key][at]
        assert what == expected, f"{key}: {what} comes where {expected} is expected"
        return max(sent, ready)

    while moved:
        moved = False
        for stage in range(p):
            while (step := todo[stage]) is not None:
                verb, key, value = step
                if verb == "compute":
                    clock[stage] += value
                elif verb == "send":
                    sends.setdefault(key, []).append((clock[stage], value))
                elif verb == "expect":
                    posted.setdefault(key, []).append((clock[stage], value))
                elif verb == "receive":
                    at = [what for _, what in posted[key]].index(value)
                    if len(sends.get(key, [])) <= at:
                        break
                    clock[stage] = max(clock[stage], arrives(key, at))
                elif key in sends:  # wait
                    last = len(sends[key]) - 1
                    if len(posted.get(key, [])) <= last:
                        break
                    clock[stage] = max(clock[stage], arrives(key, last))
                todo[stage], moved = next(steps[stage], None), True
    return clock if not any(todo) else None


def _steps(stage: int, chunks: Chunks, actions: Sequence[Action], cost: Cost) -> Iterator[tuple[str, Any, Any]]:
    """What the executor does: (verb, (from, to, direction), microbatch and chunk that it goes into, or slots)."""
    keys, early = set(), received_early(actions, stage, chunks)
    posted = {action for later in early.values() for action in later}

    def expect(action: Action) -> tuple[str, Any, Any]:
        number, ahead = chunks.number(stage, action.chunk), action.sends
        return (
            "expect",
            (chunks.stage(number - ahead), stage, FORWARD if ahead > 0 else BACKWARD),
            (action.slot, number),
        )

    for action in actions:
        yield from map(expect, early.get(action, []))
        number, ahead = chunks.number(stage, action.chunk), action.sends
        direction = FORWARD if ahead > 0 else BACKWARD
        for verb, other, into in (("receive", number - ahead, number), ("send", number + ahead, number + ahead)):
            neighbour = chunks.stage(other) if ahead and 0 <= other <= chunks.last else stage
            if verb == "send":
                yield "compute", None, cost[type(action)]
            if neighbour == stage:
                continue  # an end of the model, a weight gradient, or the turn back
            key = (neighbour, stage, direction) if verb == "receive" else (stage, neighbour, direction)
            if verb == "send":
                keys.add(key)
                yield "wait", key, None
            elif action not in posted:
                yield expect(action)
            yield verb, key, (action.slot, into)
    for key in sorted(keys):
        yield "wait", key, None


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_no_schedule_gets_stuck(kind: str) -> None:
    """Every message is also the one that its receiver expects: a border carries no names."""
    for p, m, v in sizes(kind, range(2, 9), range(1, 25), (1, 2, 3, 4)):
        assert played(lists(kind, p, m, v), chunks_of(kind, p, v)) is not None, (p, m, v)


@pytest.mark.quick(1)
@pytest.mark.parametrize("cost", [EQUAL, TWICE], ids=["equal", "twice"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bubble(kind: str, cost: Cost) -> None:
    """(p-1)/m of the time that the slots take; interleaved (p-1)/(v m), for a slot is then 1/v of a stage; where weight
    gradients are apart, a third of that."""
    for p, m, v in sizes(kind, range(2, 9), range(1, 25), (1, 2, 4)):
        apart = kind in APART
        busy = m * v * (3 if apart else cost[Forward] + cost[Backward])
        ends = played(lists(kind, p, m, v), chunks_of(kind, p, v), cost)
        assert ends is not None
        assert (max(ends) - busy) * v * m * (3 if apart else 1) == (p - 1) * busy, (p, m, v)


WRONG = {
    "stage 1 waits for what stage 0 sends later": [
        [Forward(0), Backward(0), Forward(1), Backward(1)],
        [Forward(0), Forward(1), Backward(0), Backward(1)],
    ],
    "stage 0 goes back through what stage 1 has not got": [
        [Forward(0), Backward(0), Forward(1), Backward(1)],
        [Forward(0), Forward(1), Backward(1), Backward(0)],
    ],
}
SMALL: dict[str, Any] = dict(layers=2, hidden=8, heads=2, seq=4, vocab=256, micro_batch=1, steps=1, precision="fp32")


def run_lists(programs: Sequence[list[Action]]) -> None:
    config = RunConfig(**SMALL, ranks=2, pp=2, accumulate=2, stage=0)
    debug(config, schedule=lambda p, stage, m, v: programs[stage]).finish()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_order_ends_in_an_error_that_names_ranks(name: str) -> None:
    programs = WRONG[name]
    assert played(programs) is None
    with pytest.raises(Deadlock, match=r"rank 0: .*\n? *rank 1: ") as raised:
        run_lists(programs)
    print(raised.value)


def test_stages_that_are_not_at_the_same_micro_batch_are_told_apart() -> None:
    """Orders that do not get stuck, in which a stage would go back through one microbatch with another's gradient."""
    programs = [[Forward(0), Forward(1), Backward(1), Backward(0)], [Forward(0), Forward(1), Backward(0), Backward(1)]]
    with pytest.raises(Mismatch) as raised:
        run_lists(programs)
    for words in ("recv microbatch 1 back into chunk 0", "send microbatch 0 back into chunk 0"):
        assert words in str(raised.value), raised.value


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (None, "its schedule gave a NoneType, expected a list of actions"),
        ([Forward(0), "B0"], "'B0' is no action, expected Forward(slot) or Backward(slot)"),
        ([Forward(2)], "Forward(slot=2, chunk=0), where there are 2 microbatches, 1 chunks, from 0"),
        ([Forward(0), Forward(0)], "Forward(slot=0, chunk=0) comes twice"),
        ([Backward(0)], "Backward(slot=0, chunk=0) comes before its forward"),
        ([Forward(0), WeightGrad(0)], "WeightGrad(slot=0, chunk=0) comes before its input gradient"),
        ([Forward(0), InputGrad(0), Backward(0)], "Backward(slot=0, chunk=0) comes twice"),
        ([Forward(0), InputGrad(0), WeightGrad(0), Forward(1), InputGrad(1)], "WeightGrad(slot=1, chunk=0) is missing"),
        (
            [way(slot) for way in (Forward, InputGrad) for slot in (0, 1)] + [WeightGrad(1), WeightGrad(0)],
            "weight gradients come in a different order from input gradients; use one order",
        ),
        ([Forward(0), Forward(1), Backward(0)], "Backward(slot=1, chunk=0) is missing"),
    ],
    ids=lambda value: str(value)[-20:],
)
def test_a_list_that_is_no_step_is_refused(actions: Any, words: str) -> None:
    with pytest.raises(InputError) as raised:
        run_lists([actions, actions])
    assert words in str(raised.value)


def test_a_schedule_of_ones_own_takes_the_place_of_the_configurations() -> None:
    config = RunConfig(**SMALL, ranks=2, pp=2, accumulate=3, stage=0)
    same, gpipe = (debug(config, schedule=SCHEDULES[kind]).finish() for kind in ("1f1b", "gpipe"))
    assert same.memory == run(config).memory
    assert gpipe.memory == run(config.replace(pipeline="gpipe")).memory != same.memory
    with pytest.raises(InputError, match="pp is 1; choose pp 2 or more"):
        debug(config.replace(pp=1), schedule=SCHEDULES["gpipe"])


# -- what is live ---------------------------------------------------------------------------------------
def most_live(events: Sequence[Event], units: set[str]) -> int:
    """Of these units, the first of each chunk: the most forwards whose activations are kept at one time."""
    held: dict[int, tuple[str, int]] = {}
    live: dict[tuple[str, int], int] = {}
    most = 0
    for event in events:
        if isinstance(event, Save) and event.scope.unit in units and event.id not in held:
            where = held[event.id] = event.scope.unit, event.scope.slot
            live[where] = live.get(where, 0) + 1
            most = max(most, len(live))
        elif isinstance(event, Free) and event.id in held:
            where = held.pop(event.id)
            live[where] -= 1
            if not live[where]:
                del live[where]
    assert not live
    return most


CASES = [
    ("zb-h1", 3, 5, 1),
    ("zb-v", 2, 4, 2),
    ("gpipe", 3, 5, 1),
    ("1f1b", 3, 5, 1),
    ("1f1b", 4, 2, 1),
    ("interleaved", 2, 4, 2),
    ("interleaved", 2, 2, 2),
    ("interleaved", 3, 5, 2),
]
MORE_CASES = [
    ("zb-h1", 4, 8, 1),
    ("zb-v", 4, 8, 2),
    ("1f1b", 4, 8, 1),
    ("gpipe", 4, 8, 1),
    ("interleaved", 4, 8, 2),
    ("interleaved", 2, 6, 3),
    ("interleaved", 3, 7, 2),
]


@pytest.mark.quick(3)
@pytest.mark.parametrize(("kind", "p", "m", "v"), CASES + MORE_CASES)
def test_so_many_micro_batches_are_live(kind: str, p: int, m: int, v: int) -> None:
    config = RunConfig(**{**SMALL, "layers": p * v, "tie_embeddings": False}, ranks=p, pp=p, accumulate=m, stage=1)
    config = config.replace(pipeline=kind, virtual_stages=v if kind == "interleaved" else None)
    keeps: dict[str, Any] = dict(keep_events=True)
    result = run(config, **keeps) if (kind, p, m, v) in CASES else plan(config, every_rank=True, **keeps)
    for stage in range(p):
        units = {f"h.{number}" for number in config.chunks.of_stage(stage)}
        assert most_live(result.events[stage], units) == expected_peak(kind, p, stage, m, v).total
