"""The states of parameters over a step, watched event by event."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

import zerosim
from zerosim.errors import InputError
from zerosim.lessons import states, stepping

SMALL = zerosim.RunConfig(stage=3, ranks=2, steps=2, layers=2, hidden=16, heads=2, seq=8, micro_batch=1)


def watched(**changes: Any) -> states.StateLog:
    with zerosim.debug(SMALL.replace(**changes)) as world:
        stepping.meet(world, "all_gather" if changes.get("stage", 3) else "all_reduce")
        return states.watch_states(world, states.one_per_unit(world))


def gathers(log: states.StateLog, rank: int) -> list[int]:
    return [log.of(rank, name).count("gathered") for name in log.names]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [4, 2, 2, 2, 2]),  # wte is the head as well
        ({"tie_embeddings": False}, [2, 2, 2, 2, 2, 2]),
        ({"keep_last_unit": True}, [3, 2, 2, 2, 2]),
        ({"reshard_after_forward": False}, [1, 1, 1, 1, 1]),
        ({"accumulate": 2}, [8, 4, 4, 4, 4]),
    ],
)
def test_how_often_a_unit_is_gathered_in_a_step(changes: dict[str, Any], expected: list[int]) -> None:
    log = watched(**changes)
    for rank in range(2):
        assert gathers(log, rank) == expected


def test_never_two_units_at_a_time() -> None:
    log = watched()
    for rank in range(2):
        spans = sorted((s.start, s.stop) for s in log.states if s.rank == rank and s.state == "gathered")
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_spans_cover_the_step_without_gaps() -> None:
    log = watched()
    for rank in range(2):
        for name in log.names:
            spans = [span for span in log.states if (span.rank, span.name) == (rank, name)]
            assert spans[0].start == 0
            assert spans[-1].stop == log.num_events
            assert all(before.stop == after.start for before, after in pairwise(spans))
            assert all(before.state != after.state for before, after in pairwise(spans))


def test_the_world_stands_at_the_end_of_the_step_and_goes_on() -> None:
    with zerosim.debug(SMALL) as world:
        stepping.meet(world, "all_gather")
        names = states.one_per_unit(world)
        first, second = (states.watch_states(world, names) for _ in range(2))
        assert gathers(first, 0) == gathers(second, 0)
        assert world.finish().weights.keys()
        assert world.result().live_bytes_after == [0, 0]
    plain = zerosim.run(SMALL)
    assert plain.losses == world.result().losses


def test_without_stage_3_parameters_stay_whole() -> None:
    log = watched(stage=0)
    assert {span.state for span in log.states} == {"whole"}
    assert states.states_figure(log, "title", rank=0)._repr_png_()


def test_lanes_and_their_names() -> None:
    log = watched()
    one = states.states_figure(log, "title", rank=1)
    words = [text.get_text() for text in one.axes[0].texts]
    assert [word for word in words if word in log.names] == list(log.names)
    assert "forward" in words
    assert "rank 1 is in" in words
    both = [text.get_text() for text in states.states_figure(log, "title").axes[0].texts]
    assert f"rank 1, {log.names[0]}" in both
    with pytest.raises(InputError, match="0 lanes"):
        states.states_figure(log, "title", rank=2)


def test_an_unknown_parameter_is_refused() -> None:
    with zerosim.debug(SMALL) as world, pytest.raises(InputError, match=r"did you mean wte\.weight"):
        states.watch_states(world, ["wte.weigth"])
