"""Slides of ownership: one ZeRO stage before, during and after backward, and stages side by side as in Figure 1.

Source: ZeRO paper (arXiv 1910.02054), Figure 1 and section 5. `holdings.py` reads the drawn pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from zerosim.report.names import KIND_WORDS
from zerosim.report.plots.holdings import STRIPS, Holding, Piece, bounds
from zerosim.report.plots.page import Page, describe, finish, stage_name
from zerosim.report.plots.slide import Slide
from zerosim.report.plots.style import KIND_PAINTS
from zerosim.report.plots.words import run_words
from zerosim.train.result import RunResult
from zerosim.units import format_bytes

_ELSEWHERE = "not on this GPU"
_THINNEST = 0.03  # inches of the thinnest visible piece
_MOMENTS = {"before": "before backward", "during": "during backward", "after": "after backward"}


def stage_figure(
    result: RunResult,
    held: Mapping[str, Sequence[Holding]],
    stage: str,
    *,
    theme: str = "light",
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw a panel for each moment, a row for each GPU, and in it a strip for each state. `held` is by moment."""
    unit = held["during"][0].unit
    note = f"A strip is the whole model, cut between its units. During: backward of {unit}."
    kinds = [piece.kind for of in held.values() for one in of for strip in one.pieces.values() for piece in strip]
    slide = _slide(f"{stage}: who holds what", run_words({"": result}), kinds, [note], theme, size)
    left, gap, panel_top = 3.2 * slide.em, 1.1 * slide.em, slide.height - 1.6 * slide.em
    wide = (slide.width - left - gap * (len(held) - 1)) / len(held)
    rows = len(next(iter(held.values())))
    high = panel_top / rows
    for column, (moment, of) in enumerate(held.items()):
        x = left + column * (wide + gap)
        slide.write(_MOMENTS[moment], (x, slide.height - 0.6 * slide.em), ha="left", bold=True)
        for row, one in enumerate(of):
            y = panel_top - (row + 1) * high
            if column == 0:
                slide.write(_gpu(one.rank), (0, y + 0.56 * high), ha="left", bold=True)
            _draw_strips(slide, result, one, (x, y), (wide, high))
    if rows < result.config.mesh.ranks:
        slide.write("…", (0.9 * slide.em, panel_top - 2 * high), bold=True)
    totals = [f"{_MOMENTS[moment]} {format_bytes(sum(of[0].nbytes.values()))}" for moment, of in held.items()]
    describe(slide.page, f"{_gpu(0)} holds {', '.join(totals)}.")
    return finish(slide.page)


def _draw_strips(
    slide: Slide, result: RunResult, one: Holding, where: tuple[float, float], size: tuple[float, float]
) -> None:
    """Draw one GPU's three strips, bytes at their ends."""
    (x, y), (wide, high), places = where, size, bounds(result)
    length, room = wide - 3.7 * slide.em, 0.88 * high / len(STRIPS)
    whole = max(stop for _, stop in places.values())
    for at, strip in enumerate(STRIPS):
        low = y + high * 0.94 - room * (at + 1)
        _strip(slide, (x, low), (length, 0.8 * room), whole, one.pieces[strip])
        for start, _ in list(places.values())[1:]:
            cut = x + start / whole * length
            slide.axes.plot([cut, cut], [low, low + 0.8 * room], color=slide.page.theme.background, linewidth=1.0)
        words = format_bytes(one.nbytes[strip]) if one.nbytes[strip] else "0"
        slide.write(words, (x + wide, low + 0.4 * room), ha="right", scale=0.8)


def _strip(
    slide: Slide, where: tuple[float, float], size: tuple[float, float], whole: int, pieces: Sequence[Piece]
) -> None:
    """Draw an outline, filled where it is held. Temporarily gathered pieces lie above permanent ones."""
    (x, y), (length, high), theme = where, size, slide.page.theme
    slide.box((x, y), length, high, facecolor=theme.band, edgecolor=theme.muted, linewidth=0.8)
    for piece in sorted(pieces, key=lambda piece: piece.kind in STRIPS):
        start, wide = piece.start / whole * length, max((piece.stop - piece.start) / whole * length, _THINNEST)
        start = min(start, length - wide)
        looks = slide.page.paint(piece.kind, KIND_PAINTS) | {"linewidth": 0, "gid": f"piece.{piece.kind}"}
        slide.box((x + start, y), wide, high, **looks)


def stages_figure(
    results: Mapping[str, RunResult],
    held: Mapping[str, Sequence[Holding]],
    *,
    theme: str = "light",
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw Figure 1 with its GPUs: a row for each ZeRO stage, a column for each drawn GPU, when backward ends."""
    ranks = next(iter(results.values())).config.mesh.ranks
    some = f"{len(next(iter(held.values())))} of {ranks:,} GPUs are drawn. " if ranks > 4 else ""
    note = f"{some}A bar is as long as the bytes of all model states; filled is what the GPU holds when backward ends."
    slide = _slide("Who holds what, by ZeRO stage", run_words(results), list(STRIPS), [note], theme, size)
    left, right, top = 7.0 * slide.em, 5.4 * slide.em, slide.height - 1.6 * slide.em
    columns = [one.rank for one in next(iter(held.values()))]
    pitch, high = (slide.width - left - right) / len(columns), top / len(held)
    slide.write("bytes per GPU", (slide.width, slide.height - 0.6 * slide.em), ha="right", scale=0.8)
    for at, rank in enumerate(columns):
        x = left + at * pitch
        slide.write(_gpu(rank), (x + 0.45 * pitch, slide.height - 0.6 * slide.em), bold=True)
        if at and rank > columns[at - 1] + 1:
            slide.write("…", (x - 0.05 * pitch, slide.height - 0.6 * slide.em), bold=True)
    whole = _whole_bytes(results, held)
    for row, (label, of) in enumerate(held.items()):
        y = top - (row + 1) * high
        slide.write(stage_name(label, "\n"), (0, y + 0.5 * high), ha="left", bold=True)
        for at, one in enumerate(of):
            _draw_bar(
                slide, results[label], one, (left + at * pitch, y + 0.18 * high), (0.9 * pitch, 0.62 * high), whole
            )
        nbytes = max(sum(one.nbytes.values()) for one in of)
        slide.write(format_bytes(nbytes), (slide.width, y + 0.5 * high), ha="right", bold=True)
        describe(slide.page, f"{label}: {format_bytes(nbytes)} per GPU.")
    return finish(slide.page)


def _whole_bytes(results: Mapping[str, RunResult], held: Mapping[str, Sequence[Holding]]) -> dict[str, float]:
    """Return the bytes of each whole state: a GPU's bytes, divided by its share of the elements."""
    found: dict[str, float] = {}
    for label, of in held.items():
        psi = max(stop for _, stop in bounds(results[label]).values())
        for strip in STRIPS:
            elements = sum(piece.stop - piece.start for piece in of[0].pieces[strip])
            if elements:
                found[strip] = max(found.get(strip, 0.0), of[0].nbytes[strip] * psi / elements)
    return found


def _draw_bar(
    slide: Slide,
    result: RunResult,
    one: Holding,
    where: tuple[float, float],
    size: tuple[float, float],
    whole: Mapping[str, float],
) -> None:
    """Draw one GPU's states side by side, each as long as its bytes; slices of all buffers are drawn as one."""
    (x, y), (wide, high), total = where, size, sum(whole.values())
    psi = max(stop for _, stop in bounds(result).values())
    for strip, nbytes in whole.items():
        length = nbytes / total * wide
        pieces = one.pieces[strip]
        elements = sum(piece.stop - piece.start for piece in pieces)
        start = _before(result, one.rank, strip) if elements < psi else 0
        joined = [Piece(strip, start, min(start + elements, psi))] if elements else []
        _strip(slide, (x, y), (length, high), psi, joined)
        x += length


def _before(result: RunResult, rank: int, strip: str) -> int:
    """Return the elements of a state on the ranks before this one."""
    layout = result.layout
    return sum(layout.part(rank, name, strip).start for name in layout.flats if strip in layout.rows(name))


def _slide(
    title: str, subtitle: str, kinds: Sequence[str], notes: Sequence[str], theme: str, size: tuple[float, float] | None
) -> Slide:
    seen, empty = [kind for kind in KIND_PAINTS if kind in kinds], Slide("", "", theme=theme, size=size)
    key = [(KIND_WORDS[kind], empty.page.paint(kind, KIND_PAINTS)) for kind in seen]
    key.append((_ELSEWHERE, _outline(empty.page)))
    return Slide(title, subtitle, key, notes, theme=theme, size=size)


def _outline(page: Page) -> dict[str, Any]:
    return {"facecolor": page.theme.band, "edgecolor": page.theme.muted, "linewidth": 0.8}


def _gpu(rank: int) -> str:
    return f"gpu{rank}"
