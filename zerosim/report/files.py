"""What a file of another framework said: one paragraph beside a plan, and every key with its source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Column

from zerosim.dialects import Reading
from zerosim.report.look import Adaptive, Grid, Stack, prose, titled
from zerosim.report.names import listed

HOWS: Mapping[str, str] = {
    "understood": "understood",
    "auto": "filled in",
    "ignored": "without effect",
    "lacking": "not modelled",
    "refused": "refused",
}
"""How a key was read, as pages say it."""


def file_text(reading: Reading) -> Stack:
    """Return in a paragraph who reads the file and what became of its keys, and the reader's notes."""
    counts = Counter(said.how for said in reading.said)
    keys = listed([f"{counts[how]} {words}" for how, words in HOWS.items() if counts[how]])
    path = reading.document.path
    text = f"Read {path} as {reading.reader}: {keys} of {len(reading.said)} keys."
    return Stack(prose(text, "dim"), *(prose(f"{note.rstrip('.')}.", "dim") for note in reading.notes), close=True)


def file_page(reading: Reading, given: Mapping[str, Any], page: RenderableType, *, all: bool) -> Stack:
    """Return a plan's page with what the file said before it; with `all`, each value and key after it."""
    tables = (values_table(reading, given), keys_table(reading)) if all else ()
    return Stack(file_text(reading), page, *tables)


def check_report(reading: Reading, given: Mapping[str, Any]) -> Stack:
    """Return what a check of a file found: refusals first, then every value and key."""
    path, refused = reading.document.path, reading.refusals
    answer = f"{path} cannot be planned as it is." if refused else f"{path} can be planned."
    grid = Grid(
        Column("key", overflow="fold"),
        Column("refused by", overflow="fold"),
        Column("why", overflow="fold"),
        Column("instead", overflow="fold"),
    )
    for one in refused:
        grid.add(one.key, one.by, one.why, one.advice or f"--without {one.key.lstrip('-')}")
    return Stack(
        prose(answer, "bold red" if refused else "bold green"),
        file_text(reading),
        titled("Refused", Adaptive(grid)) if refused else None,
        keys_table(reading),
        values_table(reading, given),
    )


def values_table(reading: Reading, given: Mapping[str, Any]) -> RenderableType:
    """Return each value of the run with its source; flags are over the file's."""
    grid = Grid("option", Column("value", overflow="fold"), Column("from", overflow="fold"))
    for name, value in {**reading.values, **given}.items():
        is_flag = name in given
        over = f"a flag, over {reading.sources[name]}" if is_flag and name in reading.values else "a flag"
        grid.add(name, shown(value), over if is_flag else reading.sources[name])
    return titled("Which value came from where", Adaptive(grid))


def keys_table(reading: Reading) -> RenderableType:
    """Return what became of each key, in the file's order."""
    grid = Grid(
        Column("key", overflow="fold"), Column("value", overflow="fold"), "read as", Column("here", overflow="fold")
    )
    for said in reading.said:
        grid.add(said.key, shown(said.value), HOWS[said.how], said.text)
    return titled("Keys", Adaptive(grid, grid.without("read as")))


def shown(value: Any) -> str:
    """Return a file's value as a cell."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and value >= 1000:
        value = int(value)  # 5e8 is a count
    return f"{value:,}" if isinstance(value, int) else str(value)
