"""A ring all-reduce, hop by hop: the chunk that each rank sends and to whom, and the chunks of each.

Rank r's data are 10**r, so that a sum's digits name its contributors. Source: Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerosim.errors import wrong
from zerosim.report.moving.film import Film, Moving, Span, line, rect, words
from zerosim.report.plots.style import LINE_PAINTS, ink_on, mixed
from zerosim.units import format_bytes

_START, _TRAVEL, _REST, _END = 1.2, 1.0, 0.8, 2.5  # seconds
_CELL, _WIDE = 24, 92  # pixels: a chunk's cell
MOST_RANKS = 6


class Hop(NamedTuple):
    """Every rank's chunks before a hop; each one's receiver and chunk; the bytes that a rank sends."""

    held: Sequence[Sequence[int]]
    sent: Mapping[tuple[int, int], int]
    nbytes: int


def moving_ring(hops: Sequence[Hop], end: Sequence[Sequence[int]], *, theme: str = "light") -> Moving:
    """Draw all hops, and the ranks' final chunks. The still picture is half way: each has one finished chunk.

    Raises: InputError for more ranks than are readable.
    """
    ranks, states = len(end), [*(hop.held for hop in hops), end]
    check_ranks(ranks)
    half, seconds = len(hops) // 2, _START + len(hops) * (_TRAVEL + _REST) + _END
    sent, data = sum(hop.nbytes for hop in hops), hops[0].nbytes * ranks
    title = f"A ring of {ranks} GPUs adds up"
    alt = (
        f"{title}. GPU r starts with {', '.join(str(10**rank) for rank in range(ranks))} in each of {ranks} chunks. In "
        f"{half} hops each GPU sends one chunk to the next, which adds: each then holds one finished chunk, "
        f"{end[0][0]}. {half} more hops pass the finished chunks on. Each GPU sends {sent / data:g} times its data."
    )
    high = ranks * _CELL + 26
    width, height = 720, (2 if ranks == 4 else 3) * high + 180
    film = Film((width, height), seconds, title, alt, theme)
    film.put(words(title, 16, 28, "b", 'style="font-size:18px"'))
    places = _places(ranks, width, height, high)
    for rank, peer in ((rank, peer) for (rank, _), peer in hops[0].sent.items()):
        film.put(_arrow(places[rank], places[peer], high, film.theme.muted))
    for rank, (x, y) in enumerate(places):
        film.put(rect(x - 8, y - 26, _WIDE + 16, high + 6, film.theme.background))
        film.put(words(f"gpu{rank}", x + _WIDE / 2, y - 8, "bc"))
    for rank, place in enumerate(places):
        for chunk in range(ranks):
            values = [state[rank][chunk] for state in states]
            _put_cell(film, values, half, sum(10**r for r in range(ranks)), place, chunk)
    for number, hop in enumerate(hops):
        begin = _begin(number)
        for (rank, chunk), peer in hop.sent.items():
            start, stop = places[rank], places[peer]
            shape = _shape(film, hop.held[rank][chunk], film.theme.color(LINE_PAINTS[1]), (0.0, 0.0))
            down = chunk * _CELL
            way = film.moved((begin, begin + _TRAVEL), (start[0], start[1] + down), (stop[0], stop[1] + down))
            film.put(shape, way, still=False)
    _put_words(film, hops, half, data)
    return film.picture()


def check_ranks(ranks: int) -> None:
    """Check the number of ranks. Raises: InputError for more than are readable, and for one, which sends to nobody."""
    if not 2 <= ranks <= MOST_RANKS:
        raise wrong("ranks", f" {ranks}: expected 2 to {MOST_RANKS} in a drawn ring")


def _begin(hop: int) -> float:
    return _START + hop * (_TRAVEL + _REST)


def _places(ranks: int, width: int, height: int, high: int) -> list[tuple[float, float]]:
    """Return the upper left corners of the ranks' cards, clockwise around the middle."""
    across, up = width / 2 - _WIDE / 2 - 70, (height - 90) / 2 - high / 2
    middle, turn = (width / 2, 56 + (height - 90) / 2), math.pi / 4 if ranks == 4 else 0.0
    found = []
    for rank in range(ranks):
        angle = 2 * math.pi * rank / ranks - turn
        x, y = math.sin(angle), -math.cos(angle)
        if ranks == 4:
            x, y = math.copysign(1, x) * 0.86, math.copysign(1, y)
        found.append((round(middle[0] + across * x - _WIDE / 2, 1), round(middle[1] + up * y - high / 2 + 14, 1)))
    return found


def _arrow(start: tuple[float, float], end: tuple[float, float], high: float, color: str) -> str:
    """Draw an arrow from one card's middle to another's, its head half way: cards cover its ends."""
    (x0, y0), (x1, y1) = ((x + _WIDE / 2, y + (high - 26) / 2) for x, y in (start, end))
    turn = math.degrees(math.atan2(y1 - y0, x1 - x0))
    at = f"translate({(x0 + x1) / 2:g} {(y0 + y1) / 2:g}) rotate({turn:.4g})"
    return line(x0, y0, x1, y1, color) + f'<path d="M-7 -6L8 0L-7 6Z" fill="{color}" transform="{at}"/>'


def _put_cell(film: Film, values: Sequence[int], half: int, full: int, place: tuple[float, float], chunk: int) -> None:
    """Draw a rank's value of one chunk: a cell for each value, visible while the rank has it."""
    ends = [_begin(hop) + _TRAVEL for hop in range(len(values) - 1)]
    starts = [0.0, *ends]
    at = 0
    while at < len(values):
        until = at
        while until + 1 < len(values) and values[until + 1] == values[at]:
            until += 1
        span: Span = (starts[at], ends[until] if until < len(ends) else film.seconds)
        paint = LINE_PAINTS[5]
        parts = str(values[at]).count("1")
        color = film.theme.color(paint)
        fill = color if values[at] == full else mixed(color, film.theme.background) if parts > 1 else film.theme.band
        shape = _shape(film, values[at], fill, (place[0], place[1] + chunk * _CELL))
        film.put(shape, film.seen([span]), still=at <= half <= until)
        at = until + 1


def _shape(film: Film, value: int, fill: str, place: tuple[float, float]) -> str:
    (x, y), edge = place, f'stroke="{film.theme.muted}"'
    box = rect(x, y, _WIDE, _CELL - 2, fill, f'rx="4" {edge}')
    return box + words(str(value), x + _WIDE / 2, y + 16, "c", f'style="fill:{ink_on(fill)}"')


def _put_words(film: Film, hops: Sequence[Hop], half: int, data: int) -> None:
    """Write in the middle what happens now, and the bytes that a rank has sent."""
    x, y = film.size[0] / 2, film.size[1] / 2 + 12
    sent = 0
    for number, hop in enumerate(hops):
        begin = _begin(number)
        span = (0.0 if number == 0 else begin - 0.2, _begin(number + 1) - 0.2)
        sent += hop.nbytes
        is_adding = number < half
        name = "reduce-scatter" if is_adding else "all-gather"
        lines = [
            (f"{name}: hop {number % half + 1} of {half}", "bc"),
            ("each GPU sends one chunk to the next,", "c"),
            ("which adds its own" if is_adding else "which stores it", "c"),
            (f"sent by each so far: {format_bytes(sent)} for {format_bytes(data)}", "mc"),
        ]
        film.put([words(text, x, y + 22 * (row - 1.5), looks) for row, (text, looks) in enumerate(lines)],
                 film.seen([span]), still=False)  # fmt: skip
    last = _begin(len(hops)) - 0.2
    done = [("all-reduce: done", "bc"), (f"each GPU sent {format_bytes(sent)} for {format_bytes(data)}:", "c"),
            (f"{sent / data:g} times its data", "c")]  # fmt: skip
    film.put([words(text, x, y + 22 * (row - 1), looks) for row, (text, looks) in enumerate(done)],
             film.seen([(last, film.seconds)]), still=False)  # fmt: skip
    still = [(f"after {half} hops each GPU has", "c"), ("one finished chunk;", "c"), (f"{half} more pass them on", "c")]
    film.put([words(text, x, y + 22 * (row - 1), looks) for row, (text, looks) in enumerate(still)],
             film.seen([]))  # fmt: skip
