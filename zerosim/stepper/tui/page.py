"""The stepper's page of text: a rank's live buffers or parameters, who owns what, the last message, or the keys."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Span, Text

from zerosim.report.names import counted
from zerosim.report.notebook import LETTERS, OTHER_TONE, TONES

if TYPE_CHECKING:
    from zerosim.stepper import DebugWorld, LiveBuffer, ParameterView

KEYS = (  # keys with a short name are in the last line of the screen, as far as they fit
    ("n, space", "next", "perform the next event: of the rank that went last, until it waits for others"),
    ("c", "collective", "run all ranks to the next collective"),
    ("0-9", "that rank", "the next event of that rank; others go first where it waits for them"),
    ("#", "", "the same for any rank: asks for its number"),
    ("u", "until", "run until an event: asks which; Enter alone repeats the last, Esc cancels"),
    ("g", "", "until the next rank is about to join a collective"),
    ("f", "finish step", "finish this step, on every rank"),
    ("b", "back", "back by one event: the run starts again and stops there"),
    ("l", "live buffers", "live buffers of a rank, the oldest first"),
    ("o", "ownership", "ownership: which rank updates which slice of each unit"),
    ("p", "parameters", "parameters of a rank: gathered, sharded, freed, elsewhere"),
    ("e", "", "the last message in full, such as an error's"),
    ("r", "run to the end", "run to the end"),
    ("B", "back 10", "back by ten events"),
    ("?, h", "help", "these keys"),
    ("q", "quit", "quit"),
    ("Ctrl-C", "", "stops a long step between two events; otherwise quits"),
)
SHORT_KEYS = [(keys.partition(",")[0], short) for keys, short, _ in KEYS if short]
UNTIL_WORDS = (
    "all_gather                                the next all_gather, on any rank",
    "rank=2 phase=backward unit=h.1            rank 2 in backward of h.1",
    "alloc kind=unsharded_param                the next gathered parameters",
    "end_of_backward rank=0 step=3             a mark, in a later step",
)
LEGEND = (
    "Each column is a rank: its place, its next event or what it waits for, its live bytes by kind.",
    "A bar is a row of its kind's letter; all ranks' bars share one scale, the most bytes of a kind so far.",
)
PAGES = ("l", "p", "o", "e", "?")
_PAGE_KEYS = (("up down", "scroll"), (" ".join(PAGES), "page"), ("0-9 left right", "rank"))
_STATE_STYLES = {"gathered": "bold", "whole": "", "sharded": "cyan"}


def text_of(page: str, world: DebugWorld, rank: int, message: str, width: int) -> tuple[str, list[Text]]:
    """Return a page's title and its lines, for a screen of that width.

    Raises: InputError for the parameters of a rank whose program has ended.
    """
    if page == "l":
        return _live(rank, world.ranks[rank].live(), width)
    if page == "p":
        return _parameters(rank, list(world.ranks[rank].parameters.values()), width)
    if page == "o":
        return "who updates which slice", [Text(line) for line in world.ownership().lines(width - 1)]
    if page == "e":
        return "the last message", [part for line in message.splitlines() for part in _wrapped(line, width)]
    return "keys", _help(width)


def _live(rank: int, rows: Sequence[LiveBuffer], width: int) -> tuple[str, list[Text]]:
    """Return the kind, name, bytes, birth, dtype and shape of every live buffer."""
    names = min(max([len(row.name) for row in rows], default=4), max(16, width - 48))
    lines = [Text(f"   {'name':{names}} {'bytes':>12} {'event':>6}  dtype shape", style="dim")]
    for row in rows:
        text = f"  {row.name[:names]:{names}} {row.nbytes:>12,} {row.born:>6}  {row.dtype:5} {row.shape}"
        lines.append(tile(row.kind).append(text))
    return f"rank {rank}: {counted(len(rows), 'live buffer')}, {sum(row.nbytes for row in rows):,} B", lines


def _parameters(rank: int, rows: Sequence[ParameterView], width: int) -> tuple[str, list[Text]]:
    """Return every parameter's state, the part of it on this rank, dtype and shape."""
    names = min(max([len(row.name) for row in rows], default=4), max(16, width - 44))
    lines = [Text(f"{'name':{names}} {'state':9} {'elements':17} dtype shape", style="dim")]
    for row in rows:
        part = {"sharded": f"{row.start:,} to {row.stop:,}", "gathered": "all", "whole": "all"}.get(row.state, "none")
        text = f"{row.name[:names]:{names}} {row.state:9} {part:17} {row.dtype:5} {row.shape}"
        lines.append(Text(text, style=_STATE_STYLES.get(row.state, "dim")))
    return f"rank {rank}: {len(rows):,} parameters", lines


def _help(width: int) -> list[Text]:
    return [
        *(line for keys, _, what in KEYS for line in _wrapped(f"{keys:9} {what}", width, indent=10, bold=9)),
        Text(),
        *_wrapped("Words for u: an event's name, and rank, phase, unit, kind or step", width, bold=width),
        *(line for words in UNTIL_WORDS for line in _wrapped(f"  {words}", width, indent=10)),
        Text(),
        *(line for words in LEGEND for line in _wrapped(words, width)),
    ]


def _wrapped(text: str, width: int, *, indent: int = 0, bold: int = 0) -> list[Text]:
    """Wrap a line, the second and later ones indented; its first `bold` letters are bold."""
    lines = textwrap.wrap(text, max(20, width - 1), subsequent_indent=" " * indent) or [""]
    return [Text(lines[0], spans=[Span(0, bold, "bold")]), *map(Text, lines[1:])]


def page_frame(title: str, lines: Sequence[Text], top: int, width: int, height: int) -> list[Text]:
    """Return a page's lines from `top` on, as a screen."""
    room = height - 2
    shown = lines[top : top + room]
    head = Text(title, style="bold")
    if len(shown) < len(lines):
        head.append(f"   lines {top + 1} to {top + len(shown)} of {len(lines)}", style="not bold dim")
    return [head, *filled(shown, room), keys_line(width, _PAGE_KEYS, [("q", "back")])]


def keys_line(width: int, keys: Sequence[tuple[str, str]], always: Sequence[tuple[str, str]]) -> Text:
    """Return the keys that fit, and those that are always shown."""
    shown = list(keys)
    while shown and sum(len(key) + len(what) + 3 for key, what in [*shown, *always]) > width + 2:
        shown.pop()
    return Text("  ").join(Text.assemble((key, "bold"), (f" {what}", "dim")) for key, what in [*shown, *always])


def filled(lines: Sequence[Text], height: int) -> list[Text]:
    """Return exactly so many lines."""
    return [*lines[: max(0, height)], *(Text() for _ in range(height - len(lines)))]


def tile(kind: str, count: int = 1) -> Text:
    """Return a kind's letter, `count` times, on its colour."""
    return Text().append(LETTERS.get(kind, "?") * count, style=f"bold white on {TONES.get(kind, OTHER_TONE)}")
