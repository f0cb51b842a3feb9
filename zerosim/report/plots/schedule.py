"""A pipeline's schedule as a Gantt picture: a row per stage, forwards and backwards numbered by microbatch.

Along x are slots, not seconds: a forward takes one, a backward two. Empty slots are the bubble, counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zerosim.analysis import formulas
from zerosim.analysis.capabilities.pipeline import SCHEDULES
from zerosim.analysis.slots import Slot, counted_bubble, counted_own_span
from zerosim.parallel.pipeline import SCHEDULES as ORDERS
from zerosim.parallel.schedule import Backward, Forward, InputGrad, WeightGrad
from zerosim.report.names import counted
from zerosim.report.plots.axes import block, rows_axis, ticks
from zerosim.report.plots.page import Page, dress, finish, frame, open_page, settle
from zerosim.report.plots.style import KIND_PAINTS, Paint

_PAINTS = {
    Forward: KIND_PAINTS["param"],
    Backward: KIND_PAINTS["optim"],
    InputGrad: KIND_PAINTS["optim"],
    WeightGrad: KIND_PAINTS["grad"],
}


def schedule_figure(
    slots: Sequence[Sequence[Slot]],
    kind: str,
    *,
    theme: str = "light",
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw `slots` of each stage, of a schedule of that kind or of that name; `size` is in inches, width first."""
    stages, chunks = len(slots), 1 + max(slot.action.chunk for slot in slots[0])
    batches = 1 + max(slot.action.slot for slot in slots[0])
    page = open_page(size, theme, (10.0, min(2.0 + 0.5 * stages, 12.0)))
    of = f"{counted(stages, 'stage')}, {counted(batches, 'microbatch', 'microbatches')}"
    title = f"{SCHEDULES.get(kind, kind)}: {of}" + (f", {chunks} chunks" if chunks > 1 else "")
    key = [
        (f"{way.name}{f', chunk {chunk}' if chunks > 1 else ''}", {"facecolor": _shade(page, paint, chunk, chunks)})
        for way, paint in _PAINTS.items()
        if any(type(slot.action) is way for own in slots for slot in own)
        for chunk in range(chunks)
    ]
    two = "an input gradient one, a weight gradient one" if kind.startswith("zb") else "a backward two"
    frame(page, title, bubble_words(slots, kind), key, [f"Slots, not seconds: a forward takes one, {two}."])
    axes = dress(page, page.figure.add_subplot(), grid="x")
    axes.set_xlim(0, max(own[-1].stop for own in slots))
    rows_axis(page, axes, [f"stage {stage}" for stage in range(stages)])
    ticks(axes.xaxis, MaxNLocator(10, integer=True))
    settle(page)
    for stage, own in enumerate(slots):
        for slot in own:
            action, span = slot.action, (float(slot.start), float(slot.stop))
            color = _shade(page, _PAINTS[type(action)], action.chunk, chunks)
            gid = f"stage{stage}.{action.letter}{action.slot}.{action.chunk}"
            block(page, axes, stage, span, color, [str(action.slot)], scale=0.85, gid=gid, linewidth=0.8)
    return finish(page)


def bubble_words(slots: Sequence[Sequence[Slot]], kind: str) -> str:
    """Return the bubble as counted, beside its closed form; by own span too, if that differs."""
    stages, chunks = len(slots), 1 + max(slot.action.chunk for slot in slots[0])
    batches = 1 + max(slot.action.slot for slot in slots[0])
    known = kind if kind in ORDERS else "interleaved" if chunks > 1 else "1f1b"
    share, own_span = counted_bubble(slots), counted_own_span(slots)
    form = formulas.bubble(known)
    formula = form.at(p=stages, m=batches, v=chunks)
    verdict = f"{form} = {formula}" + ("" if formula == share else ", which it is not")
    words = f"Each stage idles for {share} of its busy time (the bubble): {verdict}"
    return words if own_span == share else f"{words}. By own span: {own_span}"


def _shade(page: Page, paint: Paint, chunk: int, chunks: int) -> str:
    """Return a chunk's colour: the first one's is full, later ones fade towards the background."""
    color, ground = page.theme.color(paint), page.theme.background
    part = 0.45 * chunk / max(chunks - 1, 1)
    mixed = (round(int(color[at : at + 2], 16) * (1 - part) + int(ground[at : at + 2], 16) * part) for at in (1, 3, 5))
    return "#" + "".join(f"{value:02x}" for value in mixed)
