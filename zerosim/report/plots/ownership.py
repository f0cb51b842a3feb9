"""Slides of ownership: one ZeRO stage before, during and after backward, and stages side by side as in Figure 1.

Source: ZeRO paper (arXiv 1910.02054), Figure 1 and section 5. `holdings.py` reads the drawn pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zerosim.report.names import KIND_WORDS
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.holdings import STRIPS, Holding, Piece, bounds
from zerosim.report.plots.panel import SLIDE, SLIDE_TYPE, Axis, Box, Panel, Place
from zerosim.report.plots.style import KIND_PAINTS, Paint, sheet_paint
from zerosim.report.plots.words import run_words
from zerosim.train.result import RunResult
from zerosim.units import format_bytes

_ELSEWHERE = "not on this GPU", sheet_paint("band", edge="muted")
_MOMENTS = {"before": "before backward", "during": "during backward", "after": "after backward"}


def stage_figure(result: RunResult, held: Mapping[str, Sequence[Holding]], stage: str) -> Chart:
    """Return a panel for each moment, a row for each GPU, and in it a strip for each state. `held` is by moment."""
    ranks = [one.rank for one in held["during"]]
    psi = max(stop for _, stop in bounds(result).values())
    names = [f"{'…' if at and rank > ranks[at - 1] + 1 else ''}gpu{rank}" for at, rank in enumerate(ranks)]
    panels = []
    for moment, of in held.items():
        boxes = list[Box]()
        for row, one in enumerate(of):
            for at, strip in enumerate(STRIPS):
                low, nbytes = row - 0.42 + 0.28 * at, one.nbytes[strip]
                words = format_bytes(nbytes) if nbytes else "0"
                boxes += _strip(strip, (0, psi), (low, low + 0.24), psi, one.pieces[strip], words)
        y = Axis.of_rows(names, hidden=moment != next(iter(held)))
        panels.append(Panel(tuple(boxes), Axis(ends=(0, psi)), y, _MOMENTS[moment], bare=True))
    note = f"A strip is the whole model, cut between its units. During: backward of {held['during'][0].unit}."
    totals = [f"{_MOMENTS[moment]} {format_bytes(sum(of[0].nbytes.values()))}" for moment, of in held.items()]
    pieces = (piece.kind for of in held.values() for one in of for strip in one.pieces.values() for piece in strip)
    return _slide(f"{stage}: who holds what", {"": result}, panels, pieces, note, [f"gpu0 holds {', '.join(totals)}."])


def _strip(name: str, x: Place, y: Place, whole: int, pieces: Sequence[Piece], words: str = "") -> list[Box]:
    """Return an outline over `x`, filled where it is held. Temporarily gathered pieces lie above permanent ones."""
    scale = (x[1] - x[0]) / whole
    boxes = [Box(f"strip.{name}", x, y, _ELSEWHERE[1], after=words, scale=0.68)]
    for piece in sorted(pieces, key=lambda piece: piece.kind in STRIPS):
        span = x[0] + piece.start * scale, x[0] + piece.stop * scale
        boxes.append(Box(f"piece.{piece.kind}", span, y, KIND_PAINTS[piece.kind]))
    return boxes


def stages_figure(results: Mapping[str, RunResult], held: Mapping[str, Sequence[Holding]]) -> Chart:
    """Return Figure 1 with its GPUs: a row for each ZeRO stage, a column for each drawn GPU, when backward ends."""
    ranks, columns = next(iter(results.values())).config.mesh.ranks, [one.rank for one in next(iter(held.values()))]
    totals = {label: format_bytes(max(sum(one.nbytes.values()) for one in of)) for label, of in held.items()}
    whole = _whole_bytes(results, held)
    panels = []
    for at, rank in enumerate(columns):
        boxes = list[Box]()
        for row, (label, of) in enumerate(held.items()):
            start = 0.0
            for strip, nbytes in whole.items():
                psi = max(stop for _, stop in bounds(results[label]).values())
                joined = _joined(results[label], of[at], strip, psi)
                boxes += _strip(strip, (start, start + nbytes), (row - 0.3, row + 0.3), psi, joined)
                start += nbytes
        y = Axis.of_rows([f"{label}\n{total}" for label, total in totals.items()], hidden=at > 0)
        title = f"{'…' if at and rank > columns[at - 1] + 1 else ''}gpu{rank}"
        panels.append(Panel(tuple(boxes), Axis(ends=(0, sum(whole.values()))), y, title, bare=True))
    some = f"{len(columns)} of {ranks:,} GPUs are drawn. " if ranks > 4 else ""
    note = f"{some}A bar is as long as the bytes of all model states; filled is what the GPU holds when backward ends."
    said = [f"{label}: {total} per GPU." for label, total in totals.items()]
    return _slide("Who holds what, by ZeRO stage", results, panels, STRIPS, note, said)


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


def _joined(result: RunResult, one: Holding, strip: str, psi: int) -> list[Piece]:
    """Return the slices of all buffers as one, after those of the ranks before this one."""
    elements = sum(piece.stop - piece.start for piece in one.pieces[strip])
    layout, start = result.layout, 0
    if elements < psi:
        start = sum(layout.part(one.rank, name, strip).start for name in layout.flats if strip in layout.rows(name))
    return [Piece(strip, start, min(start + elements, psi))] if elements else []


def _slide(
    title: str,
    results: Mapping[str, RunResult],
    panels: Sequence[Panel],
    kinds: Iterable[str],
    note: str,
    said: Sequence[str],
) -> Chart:
    seen = set(kinds)
    key: list[tuple[str, Paint]] = [(KIND_WORDS[kind], paint) for kind, paint in KIND_PAINTS.items() if kind in seen]
    rows, key = (tuple(panels),), [*key, _ELSEWHERE]
    return Chart(title, run_words(results), rows, tuple(key), (note,), tuple(said), SLIDE, largest_type=SLIDE_TYPE)
