"""A pipeline's schedule as a Gantt picture: a row per stage, forwards and backwards numbered by microbatch.

Along x are slots, not seconds: a forward takes one, a backward two. Empty slots are the bubble, counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerosim.analysis import formulas
from zerosim.analysis.capabilities.pipeline import SCHEDULES
from zerosim.analysis.slots import Slot, counted_bubble, counted_own_span
from zerosim.parallel.pipeline import SCHEDULES as ORDERS
from zerosim.parallel.schedule import Backward, Forward, InputGrad, WeightGrad
from zerosim.report.names import counted
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.panel import Axis, Box, Panel
from zerosim.report.plots.style import KIND_PAINTS

_PAINTS = {
    Forward: KIND_PAINTS["param"],
    Backward: KIND_PAINTS["optim"],
    InputGrad: KIND_PAINTS["optim"],
    WeightGrad: KIND_PAINTS["grad"],
}


def schedule_figure(slots: Sequence[Sequence[Slot]], kind: str) -> Chart:
    """Return `slots` of each stage, of a schedule of that kind or of that name."""
    stages, chunks = len(slots), 1 + max(slot.action.chunk for slot in slots[0])
    batches = 1 + max(slot.action.slot for slot in slots[0])
    shades = {
        (way, chunk): paint.faded(0.45 * chunk / max(chunks - 1, 1))  # later chunks fade towards the background
        for way, paint in _PAINTS.items()
        if any(type(slot.action) is way for own in slots for slot in own)
        for chunk in range(chunks)
    }
    boxes = [
        Box(f"stage{stage}.{action.letter}{action.slot}.{action.chunk}", (start, stop), (stage - 0.4, stage + 0.4),
            shades[type(action), action.chunk], (str(action.slot),))
        for stage, own in enumerate(slots)
        for action, start, stop in own
    ]  # fmt: skip
    x = Axis(ends=(0, max(own[-1].stop for own in slots)), whole=True)
    panel = Panel(tuple(boxes), x, Axis.of_rows([f"stage {stage}" for stage in range(stages)]), grid="x")
    of = f"{counted(stages, 'stage')}, {counted(batches, 'microbatch', 'microbatches')}"
    title = f"{SCHEDULES.get(kind, kind)}: {of}" + (f", {chunks} chunks" if chunks > 1 else "")
    key = tuple(
        (f"{way.name}{f', chunk {chunk}' if chunks > 1 else ''}", paint) for (way, chunk), paint in shades.items()
    )
    two = "an input gradient one, a weight gradient one" if kind.startswith("zb") else "a backward two"
    notes = (f"Slots, not seconds: a forward takes one, {two}.",)
    return Chart(title, bubble_words(slots, kind), ((panel,),), key, notes, size=(10.0, min(2.0 + 0.5 * stages, 12.0)))


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
