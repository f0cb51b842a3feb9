"""The pictures and tables of who owns what."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

import zerosim
from zerosim.errors import InputError
from zerosim.lessons.ownership import ownership_figure, slices_table
from zerosim.stepper import OwnedSlice, Ownership

SMALL = zerosim.RunConfig(stage=3, ranks=3, steps=1, layers=2, hidden=16, heads=2, seq=8, micro_batch=1)


def ownership_of(**changes: Any) -> Ownership:
    with zerosim.debug(SMALL.replace(**changes)) as world:
        return world.ownership()


def words_of(figure: Any) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_slices_are_named_by_their_elements_and_padding_is_told() -> None:
    ownership = ownership_of()
    words = words_of(ownership_figure(ownership))
    assert "0 to 10" in words  # the last norm: 32 elements on 3 ranks
    assert "22 to 32 (1 padding)" in words
    assert sum("padding" in word for word in words) == sum(row.padding > 0 for row in ownership.rows)


def test_widths_are_shares_of_the_buffer() -> None:
    axes = ownership_figure(ownership_of()).axes[0]
    widths = [patch.get_width() for patch in axes.patches]
    assert len(widths) == 3 * len({row.unit for row in ownership_of().rows})
    assert widths == pytest.approx([1 / 3] * len(widths))


def test_an_owner_has_the_whole_bar() -> None:
    ownership = ownership_of(partition="owner")
    words = words_of(ownership_figure(ownership))
    for row in (row for row in ownership.rows if row.stop):
        assert f"0 to {row.numel - 1:,}" in words


def test_more_ranks_than_colours_are_refused() -> None:
    rows = tuple(OwnedSlice("u", 70, rank, 10 * rank, 10 * rank + 10, 0) for rank in range(7))
    with pytest.raises(InputError, match="7 ranks and 1 units: expected at most 6"):
        ownership_figure(Ownership(7, rows))


def test_the_table_says_what_each_rank_holds() -> None:
    with zerosim.debug(SMALL) as world:
        world.until("end_of_forward", rank=2)
        name = "h.0.mlp.c_fc.weight"
        console = Console(width=120, color_system=None)
        with console.capture() as said:
            console.print(slices_table(world, name))
        lines = [line for line in said.get().splitlines() if line.startswith("rank")]
        held = [rank.parameters[name] for rank in world.ranks]
    assert len(lines) == 3
    assert sum(view.stop - view.start for view in held) == 16 * 64
    for line, view in zip(lines, held, strict=True):
        assert view.state in line
        assert f"{view.stop - view.start:,}" in line
