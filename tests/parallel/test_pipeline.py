"""Schedules of pipelines: what each list promises, that none gets stuck, what is live meanwhile and how long one waits.

p stages, m micro-batches, v chunks of layers on each rank; stage i from 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from zerosim.config import RunConfig
from zerosim.device.events import Event, Free, Save
from zerosim.errors import Deadlock, InputError, Mismatch
from zerosim.parallel.pipeline import BACKWARD, FORWARD, SCHEDULES
from zerosim.parallel.schedule import Action, Backward, Forward
from zerosim.stepper import debug
from zerosim.train.plan import plan
from zerosim.train.run import run

KINDS = list(SCHEDULES)


def sizes(kind: str, stages: Sequence[int], slots: Sequence[int], chunks: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """(p, m, v) that a schedule takes."""
    for p in stages:
        for m in slots:
            if kind != "interleaved":
                yield p, m, 1
            elif m % p == 0:
                yield from ((p, m, v) for v in chunks)


def lists(kind: str, p: int, m: int, v: int = 1) -> list[list[Action]]:
    return [SCHEDULES[kind](p, stage, m, v) for stage in range(p)]


def peak_in(actions: Sequence[Action]) -> int:
    """The most micro-batches (of chunks) that are forward and not yet backward."""
    live = peak = 0
    for action in actions:
        live += 1 if isinstance(action, Forward) else -1
        peak = max(peak, live)
    return peak


def expected_peak(kind: str, p: int, stage: int, m: int, v: int) -> int:
    if kind == "gpipe":
        return m
    if kind == "1f1b":
        return min(m, p - stage)
    return min(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1)


# -- the lists ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_each_slot_and_chunk_goes_forward_and_then_backward_once(kind: str) -> None:
    for p, m, v in sizes(kind, range(2, 9), range(1, 25), (1, 2, 3, 4)):
        for stage, actions in enumerate(lists(kind, p, m, v)):
            assert len(actions) == len(set(actions)) == 2 * m * v
            place = {action: at for at, action in enumerate(actions)}
            for chunk in range(v):
                forward, backward = ([place[way(slot, chunk)] for slot in range(m)] for way in (Forward, Backward))
                assert forward == sorted(forward)  # both in micro-batch order
                assert backward == sorted(backward)
                assert all(there < back for there, back in zip(forward, backward, strict=True))
            assert peak_in(actions) == expected_peak(kind, p, stage, m, v)


def test_first_stages_of_an_interleaved_pipeline_hold_most() -> None:
    """pv + p - 1 chunks from 2p micro-batches on: L (1 + (p-1)/(pv)) layers."""
    for p, m, v in sizes("interleaved", range(2, 9), range(4, 25), (2, 3, 4)):
        if m >= 2 * p:
            assert peak_in(lists("interleaved", p, m, v)[0]) == p * v + p - 1


# -- a run of the lists ---------------------------------------------------------------------------------
Cost = tuple[int, int]
"""Slots that a forward and a backward of a chunk take."""


def played(programs: Sequence[Sequence[Action]], v: int = 1, cost: Cost = (1, 1)) -> list[int] | None:
    """When each stage ends, by the executor's rule; None where they get stuck.

    Each action receives, computes, waits until what it sent in this direction before has arrived, and sends.
    """
    p, clock = len(programs), [0] * len(programs)
    steps = [_steps(stage, p, v, actions, cost) for stage, actions in enumerate(programs)]
    todo = [next(each, None) for each in steps]
    on_the_way: dict[tuple[int, int, int], deque[tuple[int, Action]]] = {}  # (from, to, direction)
    arrived: dict[tuple[int, int, int], list[int]] = {}  # when, message by message
    sent: dict[tuple[int, int, int], int] = {}
    moved = True
    while moved:
        moved = False
        for stage in range(p):
            while (step := todo[stage]) is not None:
                verb, key, value = step
                if verb == "compute":
                    clock[stage] += value
                elif verb == "send":
                    on_the_way.setdefault(key, deque()).append((clock[stage], value))
                    sent[key] = sent.get(key, 0) + 1
                elif verb == "receive":
                    if not on_the_way.get(key):
                        break
                    when, what = on_the_way[key].popleft()
                    assert what == value, f"stage {stage} receives {what} where it expects {value}"
                    clock[stage] = max(clock[stage], when)
                    arrived.setdefault(key, []).append(clock[stage])
                elif key in sent:  # wait
                    if len(arrived.get(key, [])) < sent[key]:
                        break
                    clock[stage] = max(clock[stage], arrived[key][sent[key] - 1])
                todo[stage], moved = next(steps[stage], None), True
    return clock if not any(todo) else None


def _steps(stage: int, p: int, v: int, actions: Sequence[Action], cost: Cost) -> Iterator[tuple[str, Any, Any]]:
    """What the executor does: (verb, (from, to, direction), action as its sender names it, or slots)."""
    keys = set()
    for action in actions:
        way: type[Action] = type(action)
        direction, step = (FORWARD, 1) if way is Forward else (BACKWARD, -1)
        source, target = (stage - step) % p, (stage + step) % p
        is_first, is_last = (stage, action.chunk) == (0, 0), (stage, action.chunk) == (p - 1, v - 1)
        starts, ends = (is_first, is_last) if way is Forward else (is_last, is_first)
        if not starts:
            wraps = stage == (0 if way is Forward else p - 1)
            yield "receive", (source, stage, direction), way(action.slot, action.chunk - step * wraps)
        yield "compute", None, cost[direction]
        if not ends:
            keys.add(key := (stage, target, direction))
            yield "wait", key, None
            yield "send", key, action
    for key in sorted(keys):
        yield "wait", key, None


@pytest.mark.parametrize("kind", KINDS)
def test_no_schedule_gets_stuck(kind: str) -> None:
    """Every message is also the one that its receiver expects: a border carries no names."""
    for p, m, v in sizes(kind, range(2, 9), range(1, 25), (1, 2, 3, 4)):
        assert played(lists(kind, p, m, v), v) is not None, (p, m, v)


@pytest.mark.parametrize("cost", [(1, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bubble(kind: str, cost: Cost) -> None:
    """(p-1)/m of the time that the slots take; interleaved (p-1)/(v m), for a slot is then 1/v of a stage."""
    for p, m, v in sizes(kind, range(2, 9), range(1, 25), (1, 2, 4)):
        ends, busy = played(lists(kind, p, m, v), v, cost), m * v * sum(cost)
        assert ends is not None
        assert (max(ends) - busy) * v * m == (p - 1) * busy, (p, m, v)


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
    """Orders that do not get stuck, in which a stage would go back through one micro-batch with another's gradient."""
    programs = [[Forward(0), Forward(1), Backward(1), Backward(0)], [Forward(0), Forward(1), Backward(0), Backward(1)]]
    with pytest.raises(Mismatch) as raised:
        run_lists(programs)
    for words in ("recv micro-batch 1 back into chunk 0", "send micro-batch 0 back into chunk 0"):
        assert words in str(raised.value), raised.value


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (None, "its schedule gave a NoneType, expected a list of actions"),
        ([Forward(0), "B0"], "'B0' is no action, expected Forward(slot) or Backward(slot)"),
        ([Forward(2)], "Forward(slot=2, chunk=0), where there are 2 micro-batches, 1 chunks, from 0"),
        ([Forward(0), Forward(0)], "Forward(slot=0, chunk=0) comes twice"),
        ([Backward(0)], "Backward(slot=0, chunk=0) comes before its forward"),
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
    with pytest.raises(InputError, match="here is one stage; choose pp 2"):
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


CASES = [("gpipe", 3, 5, 1), ("1f1b", 3, 5, 1), ("1f1b", 4, 2, 1), ("interleaved", 2, 4, 2), ("interleaved", 2, 2, 2)]
MORE_CASES = [("1f1b", 4, 8, 1), ("gpipe", 4, 8, 1), ("interleaved", 4, 8, 2), ("interleaved", 2, 6, 3)]


@pytest.mark.parametrize(("kind", "p", "m", "v"), CASES + MORE_CASES)
def test_so_many_micro_batches_are_live(kind: str, p: int, m: int, v: int) -> None:
    config = RunConfig(**{**SMALL, "layers": p * v, "tie_embeddings": False}, ranks=p, pp=p, accumulate=m, stage=1)
    config = config.replace(pipeline=kind, virtual_stages=v if v > 1 else None)
    keeps: dict[str, Any] = dict(keep_events=True)
    result = run(config, **keeps) if (kind, p, m, v) in CASES else plan(config, every_rank=True, **keeps)
    for stage in range(p):
        units = {f"h.{chunk * p + stage}" for chunk in range(v)}
        assert most_live(result.events[stage], units) == expected_peak(kind, p, stage, m, v)
