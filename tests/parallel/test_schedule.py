"""A step as actions: what the list promises, what a strategy sees of it, and gathers that come before their use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from zerosim.comm.collectives import Comm
from zerosim.comm.group import Work
from zerosim.comm.runtime import launch
from zerosim.config import RunConfig
from zerosim.device.device import Device
from zerosim.device.events import Kernel, Launch, Wait
from zerosim.dtypes import fp32
from zerosim.errors import InputError
from zerosim.ledger.ranks import RankLedgers
from zerosim.models.model import Model
from zerosim.nn import Unit
from zerosim.optim.updater import Updater
from zerosim.parallel.base import Strategy
from zerosim.parallel.schedule import Action, Backward, Forward, Use, schedule, uses_of
from zerosim.parallel.zero3 import Zero3
from zerosim.tensor.flat import Flat
from zerosim.tensor.tensor import cpu
from zerosim.train.build_strategy import build_strategy
from zerosim.train.result import RunResult
from zerosim.train.run import Experiment
from zerosim.train.world import world_of

SMALL: dict[str, Any] = dict(layers=2, hidden=16, heads=2, seq=7, micro_batch=1, steps=2, ranks=2)


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_each_micro_batch_goes_forward_then_backward(micro_batches: int) -> None:
    actions = schedule(1, 0, micro_batches)
    assert [action.slot for action in actions if isinstance(action, Forward)] == list(range(micro_batches))
    assert [action.slot for action in actions if isinstance(action, Backward)] == list(range(micro_batches))
    assert all(actions.index(Forward(slot)) + 1 == actions.index(Backward(slot)) for slot in range(micro_batches))


@pytest.mark.parametrize("asked", [(2, 0, 1), (1, 1, 1), (1, -1, 1), (1, 0, 0)])
def test_what_is_no_schedule_is_refused(asked: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="expected"):
        schedule(*asked)


def run_with(kind: type[Strategy] | None, **changes: Any) -> RunResult:
    """A run whose ranks have this strategy; None for the configuration's own."""
    config = RunConfig(**{**SMALL, **changes})

    def make(config: RunConfig, model: Model, comm: Comm, device: Device, updater: Updater) -> Strategy:
        if kind is None:
            return build_strategy(config, model, comm, device, updater)
        return kind(comm, device, updater)

    experiment, ledgers = Experiment(config, make), [RankLedgers(rank) for rank in range(config.mesh.ranks)]

    def program(ctx: Any) -> Any:
        try:
            return experiment.train_rank(ctx)
        finally:
            ledgers[ctx.rank].events = ctx.device.recorder.history

    outcomes = launch(program, world_of(config, keep_events=True), lambda rank: ledgers[rank].readers)
    return experiment.result(outcomes, ledgers, keep_events=True)


class Watching(Zero3):
    """Writes down where it is at each point, and what it is told of what comes."""

    def __init__(self, comm: Comm, device: Device, updater: Updater) -> None:
        super().__init__(comm, device, updater)
        self.seen: list[tuple[str, type[Action], bool, bool]] = []
        self.began: list[Sequence[Use]] = []
        if comm.rank == 0:
            SEEN.append(self)

    def begin(self, uses: Sequence[Use]) -> None:
        super().begin(uses)
        self.began.append(uses)

    def note(self, unit: Unit, kind: type[Action]) -> None:
        place = len(self.seen) % len(self.began[-1])
        assert self.began[-1][place] == (unit, kind(self.device.where.slot))
        assert list(self.timetable.coming(3)) == list(self.began[-1][place + 1 : place + 4])
        self.seen.append((unit.name, kind, self.last, self.timetable.ends_action))

    def pre_forward(self, unit: Unit) -> None:
        self.note(unit, Forward)
        super().pre_forward(unit)

    def pre_backward(self, unit: Unit) -> None:
        self.note(unit, Backward)
        super().pre_backward(unit)


SEEN: list[Watching] = []


def test_a_strategy_is_told_what_comes() -> None:
    SEEN.clear()
    run_with(Watching, accumulate=2)
    [watching] = SEEN
    names = ["wte", "wpe", "h.0", "h.1", "ln_f", "lm_head"]
    forward = [(name, Forward) for name in names]
    backward = [(name, Backward) for name in reversed(names)]
    assert [seen[:2] for seen in watching.seen] == 2 * 2 * [*forward, *backward]
    half = len(forward + backward)
    assert [seen[2] for seen in watching.seen] == 2 * (half * [False] + half * [True])
    ends = [seen[:2] for seen in watching.seen if seen[3]]
    assert ends == 4 * [("lm_head", Forward), ("wte", Backward)]
    assert len(watching.began) == 2


class Prefetching(Zero3):
    """Gathers each unit while the one before it computes."""

    def __init__(self, comm: Comm, device: Device, updater: Updater) -> None:
        super().__init__(comm, device, updater)
        self.work: list[tuple[Flat, Work[Any]]] = []

    def pre_forward(self, unit: Unit) -> None:
        while self.work:
            flat, work = self.work.pop()
            flat.unshard(work.wait())
        super().pre_forward(unit)
        for use in self.timetable.coming(1):
            if use.unit.flat.param is None:
                flat = use.unit.flat
                self.work.append((flat, self.comm.launch_all_gather(flat.shard())))

    def pre_backward(self, unit: Unit) -> None:
        self.pre_forward(unit)


@pytest.mark.bits
@pytest.mark.parametrize("changes", [{}, {"accumulate": 2, "tie_embeddings": False}, {"recompute": "full"}], ids=str)
def test_gathers_that_come_before_their_use_change_no_bit(changes: dict[str, Any]) -> None:
    plain, early = run_with(None, **changes), run_with(Prefetching, **changes)
    assert early.losses == plain.losses
    assert all(np.array_equal(early.weights[name], plain.weights[name]) for name in plain.weights)
    assert early.live_bytes_after == plain.live_bytes_after
    for rank in range(2):
        assert [row[1:] for row in early.traffic[rank]] == [row[1:] for row in plain.traffic[rank]]
    assert overlapping(early) > 0 == overlapping(plain)


def overlapping(result: RunResult) -> int:
    """Gathers during which rank 0 computed."""
    events, count = result.events[0], 0
    waits = {event.work: at for at, event in enumerate(events) if isinstance(event, Wait)}
    for at, event in enumerate(events):
        if isinstance(event, Launch) and event.op == "all_gather":
            between = events[at : waits[event.work]]
            count += any(isinstance(kernel, Kernel) and kernel.work is None for kernel in between)
    return count


def test_uses_follow_the_actions() -> None:
    units = [Unit(name, Flat(name, cpu(), fp32, fp32), lambda x: x) for name in "ab"]
    actions = [Forward(0), Forward(1), Backward(0), Backward(1)]
    assert uses_of(actions, units) == [
        *(Use(unit, Forward(slot)) for slot in (0, 1) for unit in units),
        *(Use(unit, Backward(slot)) for slot in (0, 1) for unit in reversed(units)),
    ]
