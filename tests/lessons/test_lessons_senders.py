"""Which collectives ranks joined, and who of them sends."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

import zerosim
from zerosim.errors import InputError
from zerosim.lessons import senders

SMALL = zerosim.RunConfig(stage=0, ranks=3, steps=1, layers=2, hidden=16, heads=2, seq=8, micro_batch=2, vocab=256)


def of_stage(stage: int, **changes: Any) -> zerosim.RunConfig:
    return SMALL.replace(stage=stage, **changes)


@pytest.mark.parametrize("partition", ["slices", "owner"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_ranks_joined_adds_up_to_what_the_ledger_counted(stage: int, partition: str) -> None:
    result = zerosim.run(of_stage(stage, partition=partition, steps=2), keep_events=True)
    for rank, events in enumerate(result.events):
        for step in range(2):
            rows = senders.joined(events, step)
            assert sum(row.sent_bytes for row in rows) == result.sent_bytes(rank, step)


def text_of(shown: Any) -> str:
    console = Console(width=200, color_system=None)
    with console.capture() as said:
        console.print(shown)
    return said.get()


def test_the_table_ends_with_the_sum() -> None:
    result = zerosim.run(of_stage(3), keep_events=True)
    last = text_of(senders.joined_table(result.events[0], 0, "title")).strip().splitlines()[-1]
    assert last.startswith("in all")
    assert last.endswith(f"{result.sent_bytes(0, 0):,}")


def words_of(figure: Any) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_owners_send_all_and_slices_share() -> None:
    runs = {
        partition: zerosim.run(of_stage(3, ranks=4, partition=partition), keep_events=True)
        for partition in ("slices", "owner")
    }
    figure = senders.busy_figure({name: run.events for name, run in runs.items()}, 0, "forward")
    words = words_of(figure)
    collectives = len([row for row in senders.joined(runs["slices"].events[0], 0) if row.phase == "forward"])
    assert words.count("25%") == 4 * collectives
    assert words.count("100%") == collectives
    with pytest.raises(InputError, match="0 collectives in the optimizer"):
        senders.busy_figure({"slices": runs["slices"].events}, 0, "optimizer")
