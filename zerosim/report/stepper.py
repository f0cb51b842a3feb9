"""The stepper's screen: every rank at one moment, what just happened, what comes, and the keys.

Owns how a moment is laid out on a terminal of a given size, as lines of text. What is shown is plain data;
who steps and who reads keys is `cli/step.py`'s affair. Kinds are told apart by their letter; colour repeats it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from zerosim.report.html import LETTERS, TONES
from zerosim.units import format_bytes

LEAST_WIDTH, LEAST_HEIGHT = 40, 12
LEAST_COLUMN = 19
KEYS = (
    ("n", "next"), ("c", "collective"), ("0-9", "that rank"), ("u", "until"), ("f", "finish step"), ("b", "back"),
    ("l", "live buffers"), ("o", "ownership"), ("p", "parameters"), ("r", "run to the end"), ("B", "back 10"),
)  # fmt: skip
ALWAYS_KEYS = (("?", "help"), ("q", "quit"))
_ASCII = str.maketrans({"─": "-", "│": "|", "→": ">", "▶": ">", "·": "-", "…": "~", "Ψ": "Psi"})


@dataclass(frozen=True, slots=True)
class RankPicture:
    """One rank: where in the mesh and in the program it is, what it stands before or waits for; its live bytes."""

    rank: int
    place: str
    where: str
    stands: str
    by_kind: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Picture:
    """One moment of a world. `ranks` are those that fit (`shown_ranks`), of `num_ranks` in all.

    `most` is, by kind, the most bytes of it that were seen so far on any rank: the kinds that have a row, and the
    scale that all bars share. `under_way` and `status` are sentences.
    """

    title: str
    did: str
    coming: str
    last_rank: int | None
    next_rank: int | None
    ranks: Sequence[RankPicture]
    num_ranks: int
    under_way: Sequence[str]
    status: str
    most: Mapping[str, int]


def shown_ranks(num_ranks: int, width: int, around: int) -> range:
    """The ranks that have a column on a terminal so wide: all, or those around one."""
    count = min(num_ranks, max(1, (width + 1) // (LEAST_COLUMN + 1)))
    first = min(max(0, around - count // 2), num_ranks - count)
    return range(first, first + count)


def arrow(sender: str, to: str, nbytes: int) -> str:
    """'rank 0 ──1,640 B→ rank 1'."""
    return f"{sender} ──{nbytes:,} B→ {to}"


def frame(picture: Picture, width: int, height: int, *, ascii: bool = False) -> list[Text]:
    """The whole screen: exactly `height` lines, none wider than `width`."""
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        lines = [
            Text(f"{width} x {height} is too small:"),
            Text(f"make it {LEAST_WIDTH} x {LEAST_HEIGHT} or more"),
            Text("q quits"),
        ]
        return fitted(lines, width, height, ascii=ascii)
    legend = _legend(picture, width)
    status = textwrap.wrap(picture.status, width)[:3] or [""]
    foot = [
        *_under_way(picture, 2 if height < 30 else 4),
        *(Text(line, style="bold") for line in status),
        keys_line(width),
    ]
    head = [
        Text(picture.title, style="bold"),
        Text("did   ", style="dim").append(picture.did, style="not dim"),
        Text("next  ", style="dim").append(picture.coming, style="not dim"),
        _rule(picture, width),
    ]
    room = height - len(head) - len(legend) - len(foot)
    body = _columns(picture, width, room)
    return fitted([*head, *body, *legend, *foot], width, height, ascii=ascii)


def fitted(lines: Sequence[Text], width: int, height: int, *, ascii: bool = False) -> list[Text]:
    """Those lines, cut and filled to a screen, in letters that can be printed."""
    shown = []
    for line in [*lines[:height], *[Text()] * (height - len(lines))]:
        cut = line.copy()
        if cut.cell_len > width:
            cut.truncate(width - 1)
            cut.append("…")
        if ascii:
            cut.plain = cut.plain.translate(_ASCII)[:width]
        shown.append(cut)
    return shown


def keys_line(width: int, keys: Sequence[tuple[str, str]] = KEYS) -> Text:
    """As many keys as fit; help and quit always."""
    always = sum(len(key) + len(what) + 3 for key, what in ALWAYS_KEYS)
    line = Text()
    for key, what in keys:
        if line.cell_len + len(key) + len(what) + 3 + always > width:
            break
        line.append(key, style="bold").append(f" {what}  ", style="dim")
    for key, what in ALWAYS_KEYS:
        line.append(key, style="bold").append(f" {what}  ", style="dim")
    line.right_crop(2)
    return line


def tile(kind: str, count: int = 1) -> Text:
    """A kind's letter, `count` times, on its colour."""
    return Text().append(LETTERS.get(kind, "?") * count, style=f"bold white on {TONES.get(kind, '#555555')}")


def _rule(picture: Picture, width: int) -> Text:
    few = len(picture.ranks) < picture.num_ranks
    first, last = picture.ranks[0].rank, picture.ranks[-1].rank
    shown = f"rank {first}" if first == last else f"ranks {first} to {last}"
    label = f" {shown} of {picture.num_ranks:,} " if few else ""
    return Text(f"──{label}".ljust(width, "─"), style="dim")


def _under_way(picture: Picture, most: int) -> list[Text]:
    """What is under way, always as many lines, so that nothing jumps."""
    lines = list(picture.under_way) or ["nothing is under way"]
    if len(lines) > most:
        lines = [*lines[: most - 1], f"and {len(lines) - most + 1} more"]
    style = "" if picture.under_way else "dim"
    return [Text(line, style=style) for line in lines] + [Text()] * (most - len(lines))


def _legend(picture: Picture, width: int) -> list[Text]:
    """What the letters of the kinds seen so far mean, in one or two lines."""
    lines = [Text()]
    for kind in _kinds(picture):
        if lines[-1].cell_len + len(kind) + 4 > width:
            lines.append(Text())
        lines[-1].append_text(tile(kind)).append(f" {kind}  ", style="dim")
    return [*lines[:2], *[Text()] * (2 - len(lines))] if width < 100 else lines[:1]


def _kinds(picture: Picture) -> list[str]:
    return [kind for kind in LETTERS if kind in picture.most] + sorted(set(picture.most) - set(LETTERS))


def _columns(picture: Picture, width: int, height: int) -> list[Text]:
    """One column per rank, side by side."""
    count = len(picture.ranks)
    each = (width - (count - 1)) // count
    columns = [_column(picture, rank, each, height) for rank in picture.ranks]
    lines = []
    for row in range(height):
        line = Text()
        for index, column in enumerate(columns):
            if index:
                line.append("│", style="dim")
            cell = column[row].copy()
            cell.truncate(each, pad=True)
            line.append_text(cell)
        lines.append(line)
    return lines


def _column(picture: Picture, rank: RankPicture, width: int, height: int) -> list[Text]:
    did, comes = rank.rank == picture.last_rank, rank.rank == picture.next_rank
    name = f"{'▶' if did else ' '}rank {rank.rank}{' · goes next' if comes else ''}"
    kinds = _kinds(picture)
    places = [rank.place] if 0 < len(rank.place) < width else rank.place.split(", ")[:2] if rank.place else []
    free = height - len(places)
    tall = 2 if free - 6 >= 2 * len(kinds) else 1  # lines that a kind has: with two its bar has the whole width
    stand_lines = min(5 if width < 30 else 3, max(2, free - 3 - tall * len(kinds)))
    stands = textwrap.wrap(rank.stands, width - 1)
    if len(stands) > stand_lines:
        stands = [*stands[: stand_lines - 1], stands[stand_lines - 1][: width - 2] + "…"]
    total = sum(rank.by_kind.values())
    lines = [
        Text(name, style="bold reverse" if did else "bold"),
        *(Text(line) for line in places),
        Text(rank.where),
        *(Text(line, style="cyan") for line in stands),
        *[Text()] * (stand_lines - len(stands)),
        _number_line(Text("bytes"), f"{total:,}", width),
    ]
    room = height - len(lines)
    shown = kinds if tall * len(kinds) <= room else kinds[: max(0, room - 1)]
    most = max(picture.most.values(), default=1)
    for kind in shown:
        lines += (_bar if tall == 1 else _tall_bar)(kind, rank.by_kind.get(kind, 0), most, width)
    if len(shown) < len(kinds) and room > 0:
        rest = sum(rank.by_kind.get(kind, 0) for kind in kinds[len(shown) :])
        lines.append(_number_line(Text("others"), f"{rest:,}", width))
    return [*lines[:height], *[Text()] * (height - len(lines))]


def _number_line(name: Text, number: str, width: int, style: str = "bold") -> Text:
    """A name on the left and a number on the right."""
    return name.append(number.rjust(width - 1 - name.cell_len), style=style)


def _bar(kind: str, nbytes: int, most: int, width: int) -> list[Text]:
    """A kind's bytes as a row of its letter, the number at its end; `most` bytes fill the room left of the number."""
    number, digits = f"{nbytes:,}", max(len(f"{most:,}"), 7)
    if digits > width - 8:
        number, digits = format_bytes(nbytes), 8
    if not nbytes:
        return [_number_line(Text(LETTERS.get(kind, "?"), style="dim"), "0", width, "dim")]
    length = _length(nbytes, most, width - digits - 2)
    return [tile(kind, length).append(number.rjust(width - 1 - length))]


def _tall_bar(kind: str, nbytes: int, most: int, width: int) -> list[Text]:
    """The kind's name and its bytes, and below them a bar; `most` bytes fill the column."""
    number = f"{nbytes:,}" if len(f"{nbytes:,}") < width - 3 else format_bytes(nbytes)
    name = kind if len(kind) + len(number) + 2 <= width else LETTERS.get(kind, "?")
    line = _number_line(Text(name, style="" if nbytes else "dim"), number, width, "" if nbytes else "dim")
    return [line, tile(kind, _length(nbytes, most, width - 1)) if nbytes else Text()]


def _length(nbytes: int, most: int, room: int) -> int:
    return min(max(1, room), max(1, round(room * nbytes / max(most, 1))))
