"""The page of `zerosim explain FILE`: what each key of another framework's file costs here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Column

from zerosim.analysis.knobs import READ, Knob
from zerosim.dialects import Reading
from zerosim.report.changes import signed
from zerosim.report.files import file_text, shown, values_table
from zerosim.report.look import Adaptive, Grid, Stack, prose, right, titled
from zerosim.report.names import kind_words


def knobs_page(reading: Reading, found: Sequence[Knob], given: Mapping[str, Any], headline: str) -> Stack:
    """Return the page: keys that cost something, largest first in the file's order, then the others and why."""
    costly = [one for one in found if one.more is not None]
    same = [one for one in found if one.is_without_effect]
    fixed = [one for one in found if one.why_not]
    return Stack(
        file_text(reading),
        prose(headline, "bold"),
        _costs(costly),
        _reasons("Read, and this plan is the same without them", same),
        _reasons("The file cannot be planned without them", fixed),
        _reasons("Without effect", [one for one in found if one.said.how == "ignored"]),
        _reasons("Not modelled", [one for one in found if one.said.how == "lacking"]),
        _myths(found),
        values_table(reading, given),
    )


def _costs(found: Sequence[Knob]) -> RenderableType | None:
    if not found:
        return None
    wide = Column("here", overflow="fold")
    grid = Grid(
        Column("key", overflow="fold"),
        Column("value", overflow="fold"),
        "default",
        wide,
        right("peak"),
        right("sent"),
        right("step"),
    )
    for one in found:
        assert one.more is not None
        seconds = one.more.seconds
        grid.add(
            one.said.key,
            shown(one.said.value),
            shown(one.default),
            one.said.text,
            signed(one.more.taken_bytes),
            signed(one.more.sent_bytes),
            None if seconds is None else signed(seconds),
        )
    if all(one.more is not None and one.more.seconds is None for one in found):
        grid = grid.without("step")
    notes = ["Peak, sent, step: a GPU's figures with the key, less those without it."]
    notes += [f"{one.said.key}: {text}." for one in found if (text := _kinds(one))]
    return titled("What each key changes", Adaptive(grid, grid.without("default")), "\n".join(notes))


def _kinds(one: Knob) -> str:
    moved = [
        f"{kind_words(kind)} {signed(after - before)}" for kind, (before, after) in one.kinds.items() if before != after
    ]
    return ", ".join(moved[:3])


def _reasons(title: str, found: Sequence[Knob]) -> RenderableType | None:
    if not found:
        return None
    grid = Grid(Column("key", overflow="fold"), Column("value", overflow="fold"), Column("why", overflow="fold"))
    for one in found:
        grid.add(one.said.key, shown(one.said.value), one.why_not or one.said.text or one.does)
    return titled(title, Adaptive(grid))


def _myths(found: Sequence[Knob]) -> RenderableType | None:
    grid = Grid(Column("key", overflow="fold"), Column("people think", overflow="fold"), Column("it", overflow="fold"))
    said = [one for one in found if one.myth and one.said.how in (*READ, "ignored")]
    for one in said:
        grid.add(one.said.key, one.myth, one.does)
    return titled("What people take them for", Adaptive(grid)) if said else None
