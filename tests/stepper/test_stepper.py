"""The stepper: any rank can be stopped anywhere, looked into and gone back with, and nothing of the run changes."""

from __future__ import annotations

import gc
import re
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from processes import SECONDS

import zerosim
from zerosim.config import RunConfig
from zerosim.device.events import Alloc, Free, Launch, Wait
from zerosim.errors import Deadlock, InputError, OutOfMemory, RankFailed
from zerosim.nn import Unit
from zerosim.parallel.zero3 import Zero3
from zerosim.stepper import DebugWorld, debug
from zerosim.train.result import RunResult
from zerosim.train.run import run

TINY: dict[str, Any] = dict(steps=2, layers=2, hidden=16, heads=2, seq=8, micro_batch=1, vocab=256)


def tiny(**changes: Any) -> RunConfig:
    return RunConfig(**{**TINY, **changes})


def rank_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def all_end() -> bool:
    """All threads of ranks, as soon as the machine lets them."""
    for thread in rank_threads():
        thread.join(SECONDS)
    return not rank_threads()


def state(world: DebugWorld) -> list[Any]:
    """Everything that can be seen of a world: records, ledgers, values of every parameter held, what is under way."""
    seen: list[Any] = [world.events, world.pending_collectives, repr(world), world.ownership()]
    for view in world.ranks:
        seen += [view.events, view.live(), view.memory(), view.status]
        for name, parameter in view.parameters.items():
            values = None if parameter.state in ("elsewhere", "freed", "unplaced") else parameter.values().tobytes()
            seen += [name, repr(parameter), values]
        for flat in view.model.flats:
            for held in (flat.master, *flat.states.values(), flat.collector.grad, flat.grad_whole, flat.grad_shard):
                seen.append(None if held is None else flat.device.backend.to_host(held.array).tobytes())
        updater = view.strategy.updater
        seen += [updater.control.updates, list(updater.control.reports), updater.control.loss_scale]
    return seen


WORLDS = [
    dict(stage=0),
    dict(stage=1),
    dict(stage=2, accumulate=2),
    dict(stage=3),
    dict(stage=3, partition="owner"),
    dict(stage=2, partition="owner", ranks=3),
    dict(stage=3, collective="ring", ranks=3, bucket_bytes=1024),
    dict(stage=3, dropout=0.1, precision="fp16", recompute="full"),
    dict(stage=3, model="llama", kv_heads=1, recipe="fsdp2"),
]


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_stepping_to_the_end_leaves_what_run_leaves(world: dict[str, Any]) -> None:
    config = tiny(**world)
    expected = run(config, keep_events=True)
    with debug(config) as stepped:
        result = stepped.finish()
    assert result.events == expected.events
    assert result.memory == expected.memory
    assert result.traffic == expected.traffic
    assert result.losses == expected.losses
    assert result.live_bytes_after == [0] * config.mesh.ranks
    for name, values in expected.weights.items():
        np.testing.assert_array_equal(result.weights[name], values)


@pytest.mark.bits
def test_any_order_of_ranks_leaves_the_same() -> None:
    config = tiny(stage=3, ranks=3, steps=1)
    expected = run(config, keep_events=True)
    random = np.random.default_rng(5)
    with debug(config) as world:
        while not world.finished:
            able = [view.rank for view in world.ranks if view.next_event is not None]
            world.next(rank=int(random.choice(able)))
        result = world.result()
    assert result.events == expected.events
    assert result.weights.keys() == expected.weights.keys()
    assert all(np.array_equal(result.weights[name], values) for name, values in expected.weights.items())


@pytest.mark.quick(1)
@pytest.mark.bits
@pytest.mark.parametrize("world", WORLDS[:6], ids=str)
@pytest.mark.parametrize("start", [3, 150, 900])
def test_back_after_twenty_events_is_the_same_state(world: dict[str, Any], start: int) -> None:
    with debug(tiny(**world)) as stepped:
        stepped.next(count=start)
        before = state(stepped)
        stepped.next(count=20)
        assert state(stepped) != before
        stepped.back(20)
        assert state(stepped) == before
        stepped.next(rank=1, count=5)
        moved = len(stepped.events) - start
        stepped.back(moved)
        assert state(stepped) == before


def test_next_is_one_event_and_the_rest_stand_still() -> None:
    with debug(tiny(stage=3)) as world:
        coming = world.peek()
        assert world.next() == coming == world.last
        assert [len(view.events) for view in world.ranks] == [1, 0, 0, 0]
        before = [len(view.events) for view in world.ranks]
        moment = world.next(rank=2)
        assert moment.rank == 2
        assert [len(view.events) for view in world.ranks] == [before[0], 0, 1, 0]
        assert world.events == [(0, world.ranks[0].events[0]), (2, moment.event)]


def test_a_rank_that_waits_lets_the_others_go_first() -> None:
    with debug(tiny(stage=3)) as world:
        world.until("wait", rank=3)  # the last to join: the others sleep until it did
        world.until("all_gather", rank=0)
        world.next(rank=0, count=2)  # launch and message; now it waits for three others
        assert world.ranks[0].next_event is None
        assert "waiting in all_gather" in world.ranks[0].status
        (way,) = world.pending_collectives
        joined = dict(way.joined)
        launch = [event for event in world.ranks[0].events if isinstance(event, Launch)][-1]
        assert 4 * joined[0] == launch.payload_bytes
        assert way.missing
        assert sorted([*joined, *way.missing]) == [0, 1, 2, 3]
        moment = world.next(rank=0)
        assert moment.rank == 0
        assert not any(0 in dict(way.joined) for way in world.pending_collectives)


def test_until_stops_before_the_event() -> None:
    with debug(tiny(stage=3)) as world:
        coming = world.until("all_gather")
        assert isinstance(coming.event, Launch)
        assert not any(isinstance(event, Launch) for _, event in world.events)
        assert world.next() == coming
        again = world.until(rank=2, phase="backward", unit="h.1")
        assert (again.rank, again.event.scope.phase, again.event.scope.unit) == (2, "backward", "h.1")
        gathered = world.until("alloc", kind="unsharded_param", rank=1)
        assert isinstance(gathered.event, Alloc)
        assert gathered.event.kind == "unsharded_param"
        assert world.until("end_of_backward").event.scope.step == 0
        assert world.until("adam", rank=3).rank == 3
        assert world.until(step=1).event.scope.step == 1


def test_names_of_events_are_taken_as_they_are_written_elsewhere() -> None:
    with debug(tiny(stage=3)) as world:
        coming = world.until("reduce-scatter", phase="Backward").event
        assert isinstance(coming, Launch)
        assert coming.op == "reduce_scatter"
        with pytest.raises(InputError, match=r"event 'reduc' never comes: did you mean reduce or [a-z_]+ or [a-z_]+\?"):
            world.until("reduc")


# -- collectives ------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("world", [*WORLDS[3:7], dict(stage=0, ranks=1)], ids=str)
def test_all_ranks_go_to_the_next_collective(world: dict[str, Any]) -> None:
    config = tiny(**world)
    records = run(config, keep_events=True).events
    launches = [[at for at, event in enumerate(record) if isinstance(event, Launch)] for record in records]
    with debug(config, start="collective") as stepped:
        for number, stand in enumerate(zip(*launches, strict=True)):
            if number:
                coming = stepped.next_collective()
                assert coming == stepped.peek()
                assert coming.rank == 0
            assert tuple(len(view.events) for view in stepped.ranks) == stand
            texts = {view.next_event.text for view in stepped.ranks if view.next_event}
            assert all(f" #{number} of " in text for text in texts)
            if number == 3:  # also from where some have joined already, and others have not
                stepped.next(rank=config.mesh.ranks - 1)
                stepped.next(rank=0, count=2 if config.mesh.ranks == 1 else 1)
        with pytest.raises(InputError, match="no collective came before the run ended"):
            stepped.next_collective()
        assert stepped.finished
        with pytest.raises(InputError, match="the run is over"):
            stepped.next_collective()


def test_a_breakpoint_stops_on_the_way_to_a_collective() -> None:
    with debug(tiny(stage=3), start="collective") as world:
        world.break_on("kernel", rank=1)
        coming = world.next_collective()
        assert coming == world.peek()
        assert (coming.rank, coming.text.split()[0]) == (1, "kernel")
        assert coming == world.next()
        with pytest.raises(InputError, match="start 'middle': expected 'init' or 'collective'"):
            debug(tiny(), start="middle")


@pytest.mark.parametrize("collective", ["direct", "ring"])
def test_a_collective_has_one_number_on_all_ranks_and_in_all_words(collective: str) -> None:
    with debug(tiny(stage=3, ranks=3, collective=collective), start="collective") as world:
        for number in range(4):
            names = set()
            for view in world.ranks:
                assert view.next_event is not None
                names.add(re.findall(r"^\w+ #\d+", view.next_event.text)[0])
            world.until("message")
            world.next()
            (way,) = set(world.pending_collectives) if collective == "direct" else world.pending_collectives[:1]
            names.add(repr(way).partition(":")[0])
            for rank in range(3):
                while not isinstance((moment := world.next(rank=rank)).event, Wait):
                    pass
                names.add(re.findall(r"^wait: (.*) is done", moment.text)[0])
            assert names == {f"all_gather #{number}"}
            world.next_collective()


def test_steps_end_together() -> None:
    with debug(tiny(stage=0)) as world:  # DDP's ranks could run ahead through a whole forward
        coming = world.finish_step()
        assert coming is not None
        assert coming.event.scope.step == 1
        assert {event.scope.step for _, event in world.events} == {-1, 0}
        assert [view.next_event is not None and view.next_event.event.scope.step for view in world.ranks] == [
            1,
            1,
            1,
            1,
        ]
        world.finish_step()
        assert world.finish_step() is None
        assert world.finished


def test_breakpoints_stop_until_and_finish_step() -> None:
    with debug(tiny(stage=2)) as world:
        world.break_on("reduce_scatter", rank=1)
        coming = world.finish_step()
        assert coming is not None
        assert isinstance(coming.event, Launch)
        assert (coming.rank, coming.event.op) == (1, "reduce_scatter")
        second = world.until("after_step")
        assert isinstance(second.event, Launch)
        world.clear_breaks()
        assert "after_step" in world.until("after_step").text


def test_what_is_called_after_each_event_can_stop_on_the_way() -> None:
    def stop() -> None:
        if len(world.events) in (20, 60):
            raise StopIteration

    with debug(tiny(stage=2)) as world:
        world.next(count=50)
        world.after_event = stop
        for go_on in (lambda: world.back(10), world.finish_step):
            with pytest.raises(StopIteration):
                go_on()
        assert len(world.events) == 60
        assert sum(len(view.events) for view in world.ranks) == 60
        assert world.finish().weights.keys() == run(tiny(stage=2)).weights.keys()


def test_what_is_live_is_what_the_ledger_counts() -> None:
    with debug(tiny(stage=3, dropout=0.1)) as world:
        for _ in range(40):
            world.next(count=37)
            for view in world.ranks:
                rows = view.live()
                assert sum(row.nbytes for row in rows) == view.memory().total_bytes
                for row in rows:
                    itemsize = {"bf16": 2, "fp32": 4, "fp64": 8, "int64": 8, "uint8": 1}[row.dtype]
                    assert row.nbytes == int(np.prod(row.shape)) * itemsize
                    born = view.events[row.born]
                    assert isinstance(born, Alloc)
                    assert (born.id, born.nbytes) == (row.id, row.nbytes)
        names = {row.name for row in world.ranks[0].live()}
        assert {"wte parameters, own slice", "h.1 master", "h.0 exp_avg_sq"} <= names


def test_a_parameter_is_sharded_gathered_and_sharded_again() -> None:
    name = "h.1.mlp.c_fc.weight"
    with debug(tiny(stage=3)) as world:
        assert world.ranks[0].parameters[name].state == "unplaced"
        world.until("all_gather", rank=3)  # by then all ranks are placed
        views = [view.parameters[name] for view in world.ranks]
        parts = [view for view in views if view.state == "sharded"]
        assert {view.state for view in views} == {"sharded", "elsewhere"}  # nothing was gathered: nothing is freed
        flat = np.concatenate([view.values() for view in parts])
        assert all(a.stop == b.start for a, b in pairwise(parts))
        world.until("linear", rank=0, unit="h.1", phase="forward")
        whole = world.ranks[0].parameters[name]
        assert whole.state == "gathered"
        np.testing.assert_array_equal(whole.values().reshape(-1), flat)
        world.until("end_of_forward", rank=0)
        was = {"sharded": "sharded", "elsewhere": "freed"}[views[0].state]
        assert world.ranks[0].parameters[name].state == was
        world.until("end_of_forward", rank=3)
        assert sorted({view.parameters[name].state for view in world.ranks}) == ["freed", "sharded"]
    with debug(tiny(stage=1)) as world:
        world.until(phase="forward")
        assert world.ranks[0].parameters[name].state == "whole"
    with debug(tiny(stage=3, partition="owner")) as world:
        world.until("broadcast", rank=3)
        states = [view.parameters[name].state for view in world.ranks]
        assert sorted(states) == ["elsewhere", "elsewhere", "elsewhere", "sharded"]
        with pytest.raises(InputError, match="holds nothing"):
            world.ranks[states.index("elsewhere")].parameters[name].values()


@pytest.mark.parametrize("partition", ["slices", "owner"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ownership_is_known_before_and_after_placing(stage: int, partition: str) -> None:
    with debug(tiny(stage=stage, partition=partition, ranks=3)) as world:
        early = world.ownership()
        world.until(phase="forward")
        late = world.ownership()
        assert early == late
        for unit in world.units[:-1]:
            slices = late.of(unit)
            assert len(slices) == 3
            real = sum(row.stop - row.start - row.padding for row in slices)
            assert real == slices[0].numel * (3 if stage == 0 else 1)


MESHES = [
    dict(pp=2),
    dict(pp=2, stage=0),
    dict(pp=2, stage=1, tie_embeddings=False),
    dict(pp=2, stage=2, model="llama"),
    dict(pp=2, gather="module"),
    dict(pp=2, stage=2, partition="owner", tie_embeddings=False),
    dict(stage=2, optimizer="muon"),
    dict(tp=2),
    dict(tp=2, pp=2, stage=1),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_map_of_owners_holds_every_element_once_for_each_copy(mesh: dict[str, Any]) -> None:
    config = tiny(**{**dict(stage=3, ranks=4, steps=1), **mesh})
    with debug(config) as world:
        early = world.ownership()
        world.next_collective()
        owned, layout = world.ownership(), world.session.experiment.layout
        model_of = [view.model for view in world.ranks]
    assert owned == early
    for rank, model in enumerate(model_of):
        assert [row.unit for row in owned.rows if row.rank == rank] == [
            name for name in layout.flats if name in {flat.name for flat in model.flats}
        ]
    tp, groups = config.mesh.tp, config.mesh.pp * config.mesh.tp
    for name, rows in owned.buffers().items():
        cut = any(weight.splits for weight in layout.flats[rows[0].unit].weights)
        stages = {layout.mesh.index(row.rank, "pp") for row in rows}
        copies = (
            len(stages) * (1 if cut else tp) * (config.mesh.ranks // groups if config.parallel.zero_stage == 0 else 1)
        )
        assert sum(row.stop - row.start - row.padding for row in rows) == copies * rows[0].numel, name
        assert len({layout.mesh.index(row.rank, "tp") for row in rows}) == (1 if cut else tp)
        assert any(line.startswith(name) for line in owned.lines())
        assert f">{name}<" in owned._repr_html_()


def test_experts_have_a_bar_for_each_rank_of_ep() -> None:
    with debug(tiny(stage=3, ranks=4, steps=1, layers=1, experts=4, top_k=2, ep=2)) as world:
        bars = world.ownership().buffers()
    who = {name: [row.rank for row in rows] for name, rows in bars.items() if "experts" in name}
    assert who == {"h.0.experts, ep 0": [0, 2], "h.0.experts, ep 1": [1, 3]}


def test_tensor_parallel_ranks_are_no_replicas_of_each_other() -> None:
    with debug(tiny(stage=3, ranks=4, tp=2)) as world:
        assert "those of rank" not in "".join(world.ownership().lines())
        assert {row.rank for row in world.ownership().buffers()["h.1, tp 1"]} == {1, 3}
    with debug(tiny(stage=3, ranks=4, dp_replicate=2)) as world:
        assert "those of rank 0" in "".join(world.ownership().lines())


LOOKS: dict[str, Any] = {
    "parameter": lambda view: view.parameters["h.1.mlp.c_fc.weight"],
    "parameters": lambda view: [view.parameters, list(view.parameters.values())],
    "values": lambda view: [one.values for one in view.parameters.values()],
    "copies": lambda view: [one.values() for one in view.parameters.values() if one.state in ("gathered", "sharded")],
    "live": lambda view: [view.live(), view.live()._repr_html_()],
    "memory": lambda view: [view.memory(), view.events, view.next_event, repr(view)],
    "view": lambda view: [view, view._repr_html_()],
}


@pytest.fixture(scope="module")
def looked_at() -> tuple[RunConfig, RunResult]:
    config = tiny(stage=3, ranks=2, steps=1)
    return config, run(config)


@pytest.mark.quick(1)
@pytest.mark.parametrize("look", LOOKS)
def test_looking_changes_nothing_however_long_a_view_is_kept(look: str, looked_at: tuple[RunConfig, RunResult]) -> None:
    config, plain = looked_at
    kept: list[Any] = []
    with debug(config) as world:
        world.until("all_gather", rank=0, unit="h.1")
        for _ in range(60):
            world.next(rank=0)
            kept += [LOOKS[look](world.ranks[0]), world.ownership(), world.pending_collectives, world.last]
        stepped = world.finish()
    assert stepped.memory == plain.memory
    assert stepped.live_bytes_after == plain.live_bytes_after == [0, 0]


def test_a_view_of_what_is_gone_says_so() -> None:
    name = "h.1.mlp.c_fc.weight"
    with debug(tiny(stage=3, ranks=2)) as world:
        world.until("linear", rank=0, unit="h.1", phase="forward")
        parameters = world.ranks[0].parameters
        gathered = parameters[name]
        assert (gathered.state, gathered.values().shape) == ("gathered", (16, 64))
        world.until("end_of_forward", rank=0)
        with pytest.raises(InputError, match=r"rank 0 has freed h\.1\.mlp.* \(gathered then\): look again"):
            gathered.values()
        shard = parameters[name]
        before = shard.values()
        world.finish_step()
        assert not np.array_equal(shard.values(), before)  # its memory is there still, and holds what was stepped to
        world.finish()
        with pytest.raises(InputError, match=r"rank 0 has freed h\.1\.mlp.* \(sharded then\): look again"):
            shard.values()
        assert {view.state for view in parameters.values()} == {"freed"}


def test_all_that_go_somewhere_return_the_event_that_comes_next() -> None:
    with debug(tiny(stage=3, ranks=2)) as world:
        assert world.next() == world.last
        assert world.until("all_gather") == world.peek() != world.last
        assert world.next_collective() == world.peek()
        assert world.finish_step() == world.peek()
        assert world.back(3) == world.peek() != world.last


def test_what_can_never_come_is_refused_at_once() -> None:
    with debug(tiny(stage=2)) as world:
        for wrong, message in (
            (dict(what="all_gathr"), "all_gather"),
            (dict(rank=4), "0 to 3"),
            (dict(unit="h.7"), "h.1"),
            (dict(phase="bckward"), "backward"),
            (dict(kind="params"), "param"),
            (dict(step=2), "steps 0 to 1"),
            (dict(step=-3), "steps 0 to 1"),
            (dict(rank="1"), "whole number"),
            (dict(what=3), "expected text"),
            ({}, "until what"),
        ):
            with pytest.raises(InputError, match=message):
                world.until(**wrong)
        for call in (lambda: world.next(count=1.5), lambda: world.back("1"), lambda: debug({})):  # type: ignore[arg-type]
            with pytest.raises(InputError, match=r"whole number|RunConfig"):
                call()
        assert not world.events
        with pytest.raises(InputError, match="did not come before step 0 ended"):
            world.until("broadcast")
        coming = world.peek()
        assert coming is not None
        assert coming.event.scope.step == 1
        with pytest.raises(InputError, match="expected 1 to"):
            world.back(10**9)
        with pytest.raises(InputError, match="not over"):
            world.result()
        world.finish()
        with pytest.raises(InputError, match="the run is over"):
            world.next()
        with pytest.raises(InputError, match="the run is over"):
            world.until("kernel")
        world.back(3)
        assert not world.finished
        assert world.next().event is not None


# -- ends -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_world_left_in_the_middle_ends_its_threads() -> None:
    gc.collect()  # worlds of tests before, which failed in the hands of those who looked on
    assert not rank_threads()

    def leave() -> None:
        with debug(tiny()) as world:
            world.next(count=50)
            assert len(rank_threads()) == 4
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()
    assert all_end()

    dropped = debug(tiny())
    dropped.next(count=50)
    del dropped
    gc.collect()
    assert all_end()

    went_back = debug(tiny())
    went_back.next(count=50)
    went_back.back(10)
    assert len(rank_threads()) == 4
    went_back.close()
    went_back.close()
    assert "closed" in repr(went_back)
    with pytest.raises(InputError, match="was closed"):
        went_back.back(1)
    assert all_end()
    assert sum(view.memory().total_bytes for view in went_back.ranks) > 0  # what was recorded is still there


def test_an_interrupt_ends_the_world() -> None:
    world = debug(tiny(stage=3))
    world.next(count=10)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    world.session.scheduler._stopped.acquire = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        world.next()
    assert all_end()


class _FreesTooEarly(Zero3):
    def post_forward(self, unit: Unit) -> None:
        super().post_forward(unit)

    def pre_backward(self, unit: Unit) -> None: ...


class _Deadlocks(Zero3):
    """0 waits for 1, 1 for 2, 2 for 0."""

    def end_backward(self) -> None:
        pairs = {0: [0, 1], 1: [1, 2], 2: [0, 2]}
        if self.comm.rank in pairs:
            self.comm.subgroup(pairs[self.comm.rank]).barrier()


def of(kind: type[Zero3]) -> Any:
    return lambda config, model, comm, device, updater: kind(comm, device, updater)


def test_a_strategys_failure_is_raised_and_can_be_looked_at() -> None:
    world = debug(tiny(stage=3), make_strategy=of(_FreesTooEarly))
    with pytest.raises(RankFailed, match=r"rank \d failed in backward of lm_head.*sharded"):
        world.finish_step()
    assert all_end()
    assert sum(view.memory().total_bytes for view in world.ranks) > 0
    last = world.last
    assert last is not None
    assert "end_of_forward" in last.text  # what it did last; the failure comes before its next event
    with pytest.raises(InputError, match="the run has ended"):
        world.next()
    world.back(5)  # to a moment before it
    assert world.ranks[0].next_event is not None
    world.close()


def test_a_deadlock_is_reported() -> None:
    with (
        pytest.raises(Deadlock, match="ranks wait in a collective"),
        debug(tiny(stage=3), make_strategy=of(_Deadlocks)) as world,
    ):
        world.finish()
    assert all_end()


def test_out_of_memory_leaves_what_was_held() -> None:
    peak = run(tiny(stage=3)).memory[0].peak.total_bytes
    world = debug(tiny(stage=3, capacity=peak - 1))
    with pytest.raises(OutOfMemory):
        world.finish()
    held = max(view.memory().total_bytes for view in world.ranks)
    assert 0 < held < peak
    assert all_end()


def test_frees_are_events_too() -> None:
    with debug(tiny(stage=3)) as world:
        coming = world.until("free", kind=None, rank=1)
        assert isinstance(coming.event, Free)
        before = world.ranks[1].memory().total_bytes
        world.next()
        assert world.ranks[1].memory().total_bytes < before


def test_worlds_are_public_and_bad_configurations_are_refused() -> None:
    assert zerosim.debug is debug
    with pytest.raises(InputError):
        zerosim.debug(tiny(data="/no/such/file"))
    assert not rank_threads()
