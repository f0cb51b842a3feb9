"""A figure as a small SVG: its texts are text, its title is the file's, and the same picture is the same bytes.

matplotlib writes a path with six decimals and a line for each point, and a hatch as a tile of many of its periods. Here
a path has hundredths of a point, as steps from one place to the next, and points that no eye could distinguish from the
line through their neighbours are left out. The drawing stays the same. Nothing outside the file is named.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from typing import BinaryIO

import matplotlib
from matplotlib.figure import Figure

_FONTS = "'DejaVu Sans', 'Bitstream Vera Sans', Verdana, Geneva, sans-serif"  # of nearly the same widths
_TILE, _PERIOD = 72, 12  # points: matplotlib's tile, and one that holds whole periods of every hatch in style.py
_POINTS = {"M": 1, "L": 1, "Q": 2, "C": 3, "z": 0}  # of a command

Point = tuple[int, int]  # in hundredths
Command = tuple[str, tuple[Point, ...]]


def write_svg(figure: Figure, file: BinaryIO) -> None:
    """Write the figure. Its label becomes the file's title, its alternative text the description."""
    buffer, nameless = io.BytesIO(), dict.fromkeys(("Date", "Creator", "Type", "Format"))
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", facecolor=figure.get_facecolor(), metadata=nameless)
    text = re.sub(r"<!DOCTYPE[^>]*>\s*", "", buffer.getvalue().decode())  # it names a file on the web
    title = html.escape(str(figure.get_label()), quote=False)
    alt = html.escape(str(getattr(figure, "alt", "")), quote=False)
    text = re.sub(
        r"(<svg [^>]*>)", lambda found: f"{found[1]}\n <title>{title}</title>\n <desc>{alt}</desc>", text, count=1
    )
    text = re.sub(r"<pattern .*?</pattern>", lambda found: _smaller_tile(found[0]), text, flags=re.DOTALL)
    text = re.sub(r'(?<= d=")[^"]*', lambda found: _shorter(found[0]), text)
    text = re.sub(r' transform="rotate\(-?0 [^"]*"', "", text)
    text = re.sub(r"(?<=[ (\"])-?\d+\.\d{3,}(?=[ )\"])", lambda found: f"{float(found[0]):.2f}", text)
    text = re.sub(r"'DejaVu Sans'(, [^;\"]*)?", _FONTS, text)
    formula = re.compile(r"(?<=<text>)\s*(.*?)\s*(?=</text>)", re.DOTALL)
    text = formula.sub(lambda found: _in_order(found[1]), text)
    file.write(_numbered(text).encode())


def _in_order(spans: str) -> str:
    """Return a formula's letters from left to right: matplotlib sorts them by their fonts, some versions several to a
    span."""
    letters = []
    for before, places, after, text in re.findall(r'<tspan ([^>]*)x="([^"]*)"([^>]*)>(.*?)</tspan>', spans, re.DOTALL):
        for x, letter in zip(places.split(), html.unescape(text), strict=True):
            letters.append((float(x), f'<tspan {before}x="{x}"{after}>{html.escape(letter)}</tspan>'))
    return "".join(letter for _, letter in sorted(letters))


def _numbered(text: str) -> str:
    """Return a file whose ids are numbered; matplotlib salts them at random."""
    numbers: dict[str, str] = {}
    salted = re.compile(r"""(\bid="|#)([A-Za-z0-9_]*?)([0-9a-f]{10})(?=["\)])""")
    return salted.sub(lambda m: f"{m[1]}{m[2]}{numbers.setdefault(m[3], str(len(numbers)))}", text)


# -- paths --------------------------------------------------------------------------------------
def _commands(path: str) -> Iterator[Command]:
    """Return matplotlib's commands, all of them absolute."""
    words = path.split()
    at = 0
    while at < len(words):
        name = words[at]
        numbers = [round(100 * float(word)) for word in words[at + 1 : at + 1 + 2 * _POINTS[name]]]
        yield name, tuple(zip(numbers[::2], numbers[1::2], strict=True))
        at += 1 + len(numbers)


def _shorter(path: str) -> str:
    """Return the same path, in steps from each point to the next."""
    done: list[tuple[str, list[int]]] = []
    here = start = (0, 0)
    for name, points in _commands(path):
        steps = [x - h for point in points for x, h in zip(point, here, strict=True)]
        if name == "L":
            _line(done, steps[0], steps[1])
        else:
            done.append((name.lower(), steps))
        here = points[-1] if points else start
        start = here if name == "M" else start
    return "".join(name + _numbers(steps) for name, steps in done).replace("m", "M", 1)


def _line(done: list[tuple[str, list[int]]], dx: int, dy: int) -> None:
    """Add one more line; of two in the same direction along an axis the longer one, of none nothing."""
    last, before = done[-1] if done else ("", [0])
    if dx and dy:
        done.append(("l", [dx, dy]))
    elif dx or dy or last == "m":
        name, step = ("v", dy) if dy else ("h", dx)
        if name == last and before[0] * step > 0:
            done[-1] = name, [before[0] + step]
        else:
            done.append((name, [step]))


def _numbers(hundredths: list[int]) -> str:
    """Return '12.5-.25': no superfluous zero, no blank before a sign."""
    text = ""
    for number in hundredths:
        digits = f"{abs(number) / 100:.2f}".rstrip("0").rstrip(".").removeprefix("0") or "0"
        sign = "-" if number < 0 else " " if text else ""
        text += sign + digits
    return text


# -- hatches ------------------------------------------------------------------------------------
def _smaller_tile(pattern: str) -> str:
    """Return a hatch's tile, cut to the periods that it holds."""
    path = re.search(r'(?<= d=")[^"]*', pattern)
    if path is None:
        return pattern
    strokes = [f"M{stroke}" for stroke in path[0].split("M")[1:]]
    kept = "".join(stroke for stroke in strokes if _is_near(stroke))
    pattern = pattern.replace(path[0], kept)
    for edge in (_TILE, _TILE + 1):
        pattern = re.sub(rf'(width|height)="{edge}"', rf'\1="{edge - _TILE + _PERIOD}"', pattern)
    return pattern


def _is_near(stroke: str) -> bool:
    """Return whether it may be visible in the smaller tile: its box, and the width of a line, meet the tile."""
    points = [point for _, of in _commands(stroke) for point in of]
    return all(min(values) <= 100 * (_PERIOD + 1) and max(values) >= -100 for values in zip(*points, strict=True))
