"""The addresses of a rank's memory over time: each buffer, reserved memory, and the holes between."""

from __future__ import annotations

from collections.abc import Iterable

from zerosim.report.export.extents import Addresses, Extent
from zerosim.report.names import ALLOCATORS, kind_words
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.panel import Axis, Boxes, Panel, Rule
from zerosim.report.plots.style import KIND_PAINTS, Paint, in_order, sheet_paint
from zerosim.report.plots.words import EVENTS, tick_bytes, whole_words
from zerosim.units import format_bytes


def addresses_figure(
    addresses: Addresses, allocator: str, *, rank: int = 0, step: int | None = None, subtitle: str = ""
) -> Chart:
    """Return one rank's addresses, under the allocator of that name; `step` None: everything recorded."""
    kinds = in_order(dict.fromkeys(one.kind for one in addresses.live), KIND_PAINTS)
    reserved = sheet_paint("grid")
    marks = [_boxes("reserved", reserved, addresses.reserved)]
    for kind in kinds:
        own = (one for one in addresses.live if one.kind == kind)
        marks.append(_boxes(f"live.{kind}", KIND_PAINTS[kind], own))
    end = addresses.num_events * (1.0 if addresses.refusal is None else 1.01)
    x = Axis(EVENTS, (0, end), whole_words, whole=True)
    panel = Panel((*marks, *_refusal(addresses)), x, Axis("address", (0, addresses.num_bytes), tick_bytes), grid="y")
    key = *((kind_words(kind), KIND_PAINTS[kind]) for kind in kinds), ("reserved, not live", reserved)
    what = "everything recorded" if step is None else f"step {step}"
    title = f"Addresses on rank {rank}, {what}: {ALLOCATORS[allocator]}"
    return Chart(title, subtitle, ((panel,),), key, (_note(addresses),), size=(9.0, 5.5))


def _note(addresses: Addresses) -> str:
    peaks = addresses.peaks
    note = (
        f"At the most {format_bytes(peaks.reserved_bytes)} were reserved, {format_bytes(peaks.requested_bytes)} "
        f"requested: {100 * peaks.fragmentation:.1f} % were never filled."
    )
    if peaks.moves:
        note += f" {format_bytes(peaks.moved_bytes)} were moved in {peaks.moves:,} moves."
    return note + " Unused addresses are left out, and so are buffers thinner than a line."


def _boxes(name: str, paint: Paint, extents: Iterable[Extent]) -> Boxes:
    return Boxes(name, paint, [(one.start, one.address, one.end, one.address + one.nbytes) for one in extents])


def _refusal(addresses: Addresses) -> list[Rule]:
    """Return a line at the refusal; its name is the request and the largest hole."""
    if addresses.refusal is None:
        return []
    words = f"out of memory: {format_bytes(addresses.refusal.nbytes)} of {addresses.refusal.kind}"
    if addresses.room is not None:
        free, hole = addresses.room.free_bytes, addresses.room.largest_hole
        words += f"; {format_bytes(free)} free, largest hole {format_bytes(hole)}"
    return [Rule(words, x=addresses.num_events)]
