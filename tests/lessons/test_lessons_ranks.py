"""The pictures that set ranks side by side: bytes, slices, senders, and states of parameters over a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import zerosim
from zerosim.errors import InputError
from zerosim.lessons import ranks, stepping
from zerosim.stepper import OwnedSlice, Ownership

SMALL = zerosim.RunConfig(stage=3, ranks=3, steps=1, layers=2, hidden=16, heads=2, seq=8, micro_batch=1)
STEPPED = SMALL.replace(ranks=2, steps=2)


def words_of(figure: Any) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


# -- live bytes --------------------------------------------------------------------------------------
def test_the_bars_of_ranks_have_their_bytes() -> None:
    with zerosim.debug(SMALL.replace(stage=0)) as world:
        stepping.meet(world, "all_reduce")
        snapshots = [rank.memory() for rank in world.ranks]
    figure = ranks.ranks_figure(snapshots, "title")
    assert next(figure.panels).y.rows == ("rank 0", "rank 1", "rank 2")
    assert figure._repr_png_()
    with pytest.raises(InputError, match="no ranks"):
        ranks.ranks_figure([], "title")


# -- who owns what -----------------------------------------------------------------------------------
def ownership_of(**changes: Any) -> Ownership:
    with zerosim.debug(SMALL.replace(**changes)) as world:
        return world.ownership()


def test_slices_are_named_by_their_elements_and_padding_is_shown() -> None:
    ownership = ownership_of()
    words = words_of(ranks.ownership_figure(ownership))
    assert "0 to 10" in words  # the last norm: 32 elements on 3 ranks
    assert "22 to 32 (1 padding)" in words
    assert sum("padding" in word for word in words) == sum(row.padding > 0 for row in ownership.rows)


def test_widths_are_shares_of_the_buffer() -> None:
    axes = ranks.ownership_figure(ownership_of()).axes[0]
    widths = [patch.get_width() for patch in axes.patches]
    assert len(widths) == 3 * len({row.unit for row in ownership_of().rows})
    assert widths == pytest.approx([1 / 3] * len(widths))


def test_an_owner_has_the_whole_bar() -> None:
    ownership = ownership_of(partition="owner")
    words = words_of(ranks.ownership_figure(ownership))
    for row in (row for row in ownership.rows if row.stop):
        assert f"0 to {row.numel - 1:,}" in words


def test_more_ranks_than_colours_are_refused() -> None:
    rows = tuple(OwnedSlice("u", 90, rank, 10 * rank, 10 * rank + 10, 0) for rank in range(9))
    with pytest.raises(InputError, match="9 ranks and 1 units: expected at most 8"):
        ranks.ownership_figure(Ownership(9, rows))


# -- who sends ---------------------------------------------------------------------------------------
def test_owners_send_all_and_slices_share() -> None:
    runs = {
        partition: zerosim.run(SMALL.replace(ranks=4, partition=partition), keep_events=True)
        for partition in ("slices", "owner")
    }
    figure = ranks.busy_figure({name: run.events for name, run in runs.items()}, 0, "forward")
    words = words_of(figure)
    collectives = len([row for row in stepping.joined(runs["slices"].events[0], 0) if row.phase == "forward"])
    assert words.count("25%") == 4 * collectives
    assert words.count("100%") == collectives
    with pytest.raises(InputError, match="0 collectives in the optimizer"):
        ranks.busy_figure({"slices": runs["slices"].events}, 0, "optimizer")


# -- states of parameters ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def watch(defined: Any) -> Callable[..., list[ranks.Glance]]:
    """Notebook 06's."""
    found: Callable[..., list[ranks.Glance]] = defined("06", "01", "13")["watch"]
    return found


def firsts(world: Any) -> list[str]:
    """The first parameter of each unit."""
    names: dict[str, str] = {}
    for view in world.ranks[0].parameters.values():
        names.setdefault(view.unit, view.name)
    return list(names.values())


@pytest.fixture(scope="module")
def watched(watch: Any) -> Callable[..., tuple[list[str], list[ranks.Glance]]]:
    def run(**changes: Any) -> tuple[list[str], list[ranks.Glance]]:
        with zerosim.debug(STEPPED.replace(**changes)) as world:
            stepping.meet(world, "all_gather" if changes.get("stage", 3) else "all_reduce")
            names = firsts(world)
            return names, watch(world, names)

    return run


def lane(seen: list[ranks.Glance], rank: int, at: int) -> list[ranks.Span]:
    return ranks.spans(glance.states[rank][at] for glance in seen)


def gathers(seen: list[ranks.Glance], rank: int) -> list[int]:
    found = [lane(seen, rank, at) for at in range(len(seen[0].states[rank]))]
    return [sum(span.what == "gathered" for span in own) for own in found]


def test_spans_cover_everything_without_gaps() -> None:
    assert ranks.spans("aabccc") == [("a", 0, 2), ("b", 2, 3), ("c", 3, 6)]
    assert ranks.spans([]) == []


def test_the_world_stands_at_the_end_of_the_step_and_goes_on(watch: Any) -> None:
    with zerosim.debug(STEPPED) as world:
        stepping.meet(world, "all_gather")
        first, second = (watch(world, firsts(world)) for _ in range(2))
        assert gathers(first, 0) == gathers(second, 0)
        assert world.finish().weights.keys()
        assert world.result().live_bytes_after == [0, 0]
    assert zerosim.run(STEPPED).losses == world.result().losses


def test_without_stage_3_parameters_stay_whole(watched: Any) -> None:
    names, seen = watched(stage=0)
    assert {state for glance in seen for own in glance.states for state in own} == {"whole"}
    assert ranks.states_figure(seen, names, "title", rank=0)._repr_png_()


def test_lanes_and_their_names(watched: Any) -> None:
    names, seen = watched()
    words = words_of(ranks.states_figure(seen, names, "title", rank=1))
    assert [word for word in words if word in names] == names
    assert "forward" in words
    assert "rank 1 is in" in words
    assert f"rank 1, {names[0]}" in words_of(ranks.states_figure(seen, names, "title"))
    with pytest.raises(InputError, match="0 lanes"):
        ranks.states_figure(seen, names, "title", rank=2)


def test_what_is_not_placed_yet_can_be_drawn(watch: Any) -> None:
    with zerosim.debug(STEPPED) as world:
        seen = watch(world, ["wte.weight"])
    assert seen[0].states == [["unplaced"], ["unplaced"]]
    assert ranks.states_figure(seen, ["wte.weight"], "title")._repr_png_()
