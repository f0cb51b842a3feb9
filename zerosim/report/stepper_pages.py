"""The stepper's other pages: a rank's live buffers, its parameters, who owns what, the keys in full.

Owns lists of lines and how a part of them is shown. Reads plain data, such as `stepper.LiveBuffer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.text import Text

from zerosim.report.ownership import SliceRow, ownership_lines
from zerosim.report.stepper import fitted, tile
from zerosim.report.stepper_html import BufferRow, shape_text
from zerosim.report.words import counted


class ParameterRow(Protocol):
    """One parameter as one rank holds it."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Page:
    """Lines under a title; `keys` says what can be pressed."""

    title: str
    lines: Sequence[Text]
    keys: str


HELP = (
    ("n, space", "the next event happens: of the rank that went last, until it waits for others"),
    ("c", "all ranks to the next collective, the first that none has joined"),
    ("0 to 9", "the next event of that rank; others go first where it waits for them"),
    ("#", "the same for any rank: asks for its number"),
    ("u", "until an event comes: asks which; Enter alone asks for the same again, Esc for nothing"),
    ("g", "until the next rank is about to join a collective"),
    ("f", "finish this step, on every rank"),
    ("r", "run to the end"),
    ("b, B", "back by one event, by ten: the run is made again up to there"),
    ("l", "live buffers of a rank, the oldest first"),
    ("p", "parameters of a rank: gathered, sharded, freed, elsewhere"),
    ("o", "ownership: which rank updates which slice of what"),
    ("?, h", "this page"),
    ("q", "quit"),
    ("Ctrl-C", "stops what takes long, and the world stands there; else quits"),
)
UNTIL_WORDS = (
    "all_gather                                the next all_gather, on any rank",
    "rank=2 phase=backward unit=h.1            rank 2 in backward of h.1",
    "alloc kind=unsharded_param                the next gathered parameters",
    "end_of_backward rank=0 step=3             a mark, in a later step",
)


def help_page(width: int) -> Page:
    lines = []
    for keys, what in HELP:
        lines.append(Text(f"{keys:9} ", style="bold").append(what, style="not bold"))
    lines += [Text(), Text("Words for u: an event's name, and rank, phase, unit, kind or step", style="bold")]
    lines += [Text(f"  {words}") for words in UNTIL_WORDS]
    lines += [
        Text(),
        Text("Each column is a rank: where it is, what it stands before or waits for, its live bytes by kind."),
        Text("A bar is a row of its kind's letter; all ranks' bars share one scale, the most bytes of a kind so far."),
    ]
    return Page("keys", [wrapped for line in lines for wrapped in _wrapped(line, width)], "any other key: back")


def _wrapped(line: Text, width: int) -> list[Text]:
    """A line of help in lines that fit; what follows the keys stays right of them."""
    shown = [line]
    while shown[-1].cell_len > width - 1:
        cut = shown[-1].plain.rfind(" ", 12, width - 1)
        if cut < 12:
            break
        first, rest = shown[-1].divide([cut])
        shown[-1:] = [first, Text(" " * 10).append_text(Text(rest.plain.lstrip()))]
    return shown


def live_page(rank: int, rows: Sequence[BufferRow], width: int) -> Page:
    """Every live buffer of a rank: kind, name, shape, dtype, bytes, the event that made it."""
    total = sum(row.nbytes for row in rows)
    names = min(max([len(row.name) for row in rows], default=4), max(16, width - 48))
    lines = [Text(f"   {'name':{names}} {'bytes':>12} {'event':>6}  dtype shape", style="dim")]
    for row in rows:
        text = f" {row.name[:names]:{names}} {row.nbytes:>12,} {row.born:>6}  {row.dtype:5} {shape_text(row.shape)}"
        lines.append(tile(row.kind).append(f" {text}"))
    return Page(f"rank {rank}: {counted(len(rows), 'live buffer')}, {total:,} B", lines, _RANK_KEYS)


def parameters_page(rank: int, rows: Sequence[ParameterRow], width: int) -> Page:
    """Every parameter of a rank: its state, and the part of it that is there."""
    names = min(max([len(row.name) for row in rows], default=4), max(16, width - 44))
    lines = [Text(f"{'name':{names}} {'state':9} {'elements':17} dtype shape", style="dim")]
    for row in rows:
        part = f"{row.start:,} to {row.stop:,}" if row.state == "sharded" else "all" if row.start < row.stop else "none"
        style = {"gathered": "bold", "whole": "", "sharded": "cyan"}.get(row.state, "dim")
        text = f"{row.name[:names]:{names}} {row.state:9} {part:17} {row.dtype:5} {shape_text(row.shape)}"
        lines.append(Text(text, style=style))
    return Page(f"rank {rank}: {len(rows):,} parameters", lines, _RANK_KEYS)


def ownership_page(rows: Sequence[SliceRow], ranks: int, width: int) -> Page:
    """One bar per unit, cut into the ranks' slices."""
    lines = [Text(line) for line in ownership_lines(rows, ranks, width - 1)]
    return Page("who updates which slice of what", lines, "up, down: scroll   any other key: back")


_RANK_KEYS = "0-9, left, right: rank   up, down: scroll   any other key: back"


def page_frame(page: Page, top: int, width: int, height: int, *, ascii: bool = False) -> list[Text]:
    """The lines from `top` on, as a screen."""
    room = height - 2
    shown = page.lines[top : top + room]
    more = len(page.lines) - top - len(shown)
    title = Text(page.title, style="bold")
    if top or more:
        title.append(f"   lines {top + 1} to {top + len(shown)} of {len(page.lines)}", style="not bold dim")
    return fitted(
        [title, *shown, *[Text()] * (room - len(shown)), Text(page.keys, style="dim")], width, height, ascii=ascii
    )


def last_top(page: Page, height: int) -> int:
    """How far a page can be scrolled."""
    return max(0, len(page.lines) - (height - 2))
