"""The pieces of a slide, as HTML: bytes with their exact number, bars, pictures, options, a count to guess."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from zerosim.report.names import KIND_WORDS
from zerosim.units import format_bytes

SvgOf = Callable[[str, str], str]
"""Returns the SVG of a picture: by the words after `zerosim plot`, and a theme."""
STATES = ("param", "grad", "optim")


class Bar(NamedTuple):
    """A labelled bar: its parts, each a colour's name and bytes, and words behind the total."""

    label: str
    parts: Sequence[tuple[str, int]]
    more: str = ""


def size(nbytes: int) -> str:
    """Return bytes for readers, with the exact number for programs."""
    return f'<data value="{nbytes}">{format_bytes(nbytes)}</data>'


def of_kinds(by_kind: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(kind, by_kind.get(kind, 0)) for kind in STATES]


def bars(rows: Sequence[Bar], *, limit: tuple[str, int] = ("", 0), key: Iterable[str] = STATES) -> str:
    """Draw bars on one scale, with a key of their kinds and a device's limit as a line."""
    most = max(limit[1], *(sum(nbytes for _, nbytes in row.parts) for row in rows))
    lines = []
    for row in rows:
        at, parts = 0.0, ""
        for kind, nbytes in row.parts:
            width = 1000 * nbytes / most
            parts += f'<rect class="{kind}" x="{at:.2f}" width="{width:.2f}" height="10"/>'
            at += width
        if limit[1]:
            place = 1000 * limit[1] / most
            parts += f'<path class="limit" d="M{place:.2f} 0V10" vector-effect="non-scaling-stroke"/>'
        total = size(sum(nbytes for _, nbytes in row.parts))
        lines.append(
            f'<div class="bar"><span>{row.label}</span><svg viewBox="0 0 1000 10" preserveAspectRatio="none" '
            f'aria-hidden="true"><rect class="ground" width="1000" height="10"/>{parts}</svg>'
            f"<b>{total}</b><span>{row.more}</span></div>"
        )
    names = "".join(f'<li class="{kind}">{KIND_WORDS.get(kind, kind.replace("_", "-"))}</li>' for kind in key)
    line = f'<li class="limit">{limit[0]}: {size(limit[1])}</li>' if limit[1] else ""
    return f'<div class="bars n{len(rows)}">{"".join(lines)}</div><ul class="key">{names}{line}</ul>'


def picture(svg_of: SvgOf, words: str) -> str:
    """Show a picture of `zerosim plot` in both themes, without its own title: the slide has one."""
    svgs = {theme: svg_of(words, theme) for theme in ("light", "dark")}
    if "<pattern" in svgs["light"] or "@keyframes" in svgs["light"]:
        svgs["paper"] = still(unhatched(svgs["light"]))
    alt = svgs["light"].split("<desc>")[1].split("</desc>")[0]
    shown = ""
    for name, svg in svgs.items():
        data = base64.b64encode(untitled(svg).encode()).decode()
        shown += f'<img class="{name}" alt="{alt}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{shown}</figure>"


def unhatched(svg: str) -> str:
    """Return a picture in plain colours: a browser prints each hatched area as a large bitmap."""
    colours = dict(re.findall(r'<pattern id="(\w+)".*?fill="(#\w+)"', svg, re.DOTALL))
    return re.sub(r"url\(#(\w+)\)", lambda found: colours.get(found[1], found[0]), svg)


def still(svg: str) -> str:
    """Return a moving picture at rest: a browser prints the first moment of a picture that moves."""
    return re.sub("@media screen[^<]*", "", svg)


def untitled(svg: str) -> str:
    """Return a picture cut off below its title, at any size."""

    def cut(head: re.Match[str]) -> str:
        width, height = head[2], float(head[3])
        return f'{head[1]}viewBox="0 {TITLE} {width} {height - TITLE:g}"'

    svg = re.sub(r'(<svg [^>]*?)viewBox="0 0 ([0-9.]+) ([0-9.]+)"', cut, svg, count=1)
    return re.sub(r'(<svg [^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)


TITLE = 34
"""The height of a picture's title, in the units of its sheet."""


def options(choices: Sequence[str], right: int, answer: str) -> str:
    """Ask a question with numbered options. `right` counts from 1; the answer is hidden until a key."""
    rows = "".join(f"<li{' data-right' * (at == right)}>{text}</li>" for at, text in enumerate(choices, 1))
    return f'<ol class="options">{rows}</ol>{_hidden(answer)}'


def count(unit: str, nbytes: int, answer: str) -> str:
    """Ask for a count in a unit; the page compares what is typed with the bytes counted."""
    scale = {"GB": 10**9, "TB": 10**12}[unit]
    box = f'<input inputmode="decimal" autocomplete="off" size="8" data-scale="{scale}" data-counted="{nbytes}">'
    return f'<p class="count"><label>The room says {box} {unit}</label></p><p class="said"></p>{_hidden(answer)}'


def _hidden(answer: str) -> str:
    return f'<div class="answer" hidden>{answer}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{one}</th>" for one in head)
    body = "".join(f"<tr>{''.join(f'<td>{one}</td>' for one in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def said(*sentences: str) -> str:
    return "".join(f"<p>{one}</p>" for one in sentences)


def command(words: str) -> str:
    return f"<code>zerosim {html.escape(words)}</code>"
