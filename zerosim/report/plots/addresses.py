"""The addresses of a rank's memory over time: each buffer, reserved memory, and the holes between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from zerosim.report.export.extents import Addresses, Extent
from zerosim.report.names import ALLOCATORS, kind_words
from zerosim.report.plots.axes import EVENTS, bytes_axis, events_axis
from zerosim.report.plots.page import Page, dress, finish, frame, ground, inches, open_page, plain
from zerosim.report.plots.style import KIND_PAINTS, in_order
from zerosim.units import format_bytes

_LEAST = 0.12 / 72  # inches: anything thinner than an eighth of a point is not drawn


def addresses_figure(
    addresses: Addresses,
    allocator: str,
    *,
    rank: int = 0,
    step: int | None = None,
    subtitle: str = "",
    theme: str = "light",
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw one rank's addresses, under the allocator of that name; `step` None: everything recorded. `size` in inches,
    width first."""
    page = open_page(size, theme, (9.0, 5.5))
    kinds = in_order(dict.fromkeys(one.kind for one in addresses.live), KIND_PAINTS)
    key = [(kind_words(kind), page.paint(kind, KIND_PAINTS)) for kind in kinds]
    key.append(("reserved, not live", {"facecolor": page.theme.grid, "linewidth": 0}))
    what = "everything recorded" if step is None else f"step {step}"
    frame(page, f"Addresses on rank {rank}, {what}: {ALLOCATORS[allocator]}", subtitle, key, _notes(addresses))
    axes = dress(page, page.figure.add_subplot(), grid="y", x=EVENTS, y="address")
    bytes_axis(axes.yaxis, addresses.num_bytes, 5)
    axes.set_xlim(0, addresses.num_events * (1.0 if addresses.refusal is None else 1.01))
    axes.set_ylim(0, addresses.num_bytes)
    events_axis(page, axes)
    _draw(page, axes, addresses.reserved, "reserved", {"facecolor": page.theme.grid, "linewidth": 0})
    for kind in kinds:
        own = [one for one in addresses.live if one.kind == kind]
        _draw(page, axes, own, f"live.{kind}", page.paint(kind, KIND_PAINTS) | {"linewidth": 0})
    if addresses.refusal is not None:
        _mark_refusal(page, axes, addresses)
    return finish(page)


def _notes(addresses: Addresses) -> list[str]:
    peaks = addresses.peaks
    note = (
        f"At the most {format_bytes(peaks.reserved_bytes)} were reserved, {format_bytes(peaks.requested_bytes)} "
        f"requested: {100 * peaks.fragmentation:.1f} % were never filled."
    )
    if peaks.moves:
        note += f" {format_bytes(peaks.moved_bytes)} were moved in {peaks.moves:,} moves."
    return [note + " Unused addresses are left out, and so are buffers thinner than a line."]


def _draw(page: Page, axes: Axes, extents: Sequence[Extent], gid: str, paint: dict[str, Any]) -> None:
    """Draw a rectangle for each visible extent."""
    width, height = inches(page, axes)
    wide, high = axes.get_xlim()[1] / width, axes.get_ylim()[1] / height
    seen = [one for one in extents if one.end - one.start >= _LEAST * wide and one.nbytes >= _LEAST * high]
    corners = [
        [(one.start, one.address), (one.end, one.address), (one.end, top), (one.start, top)]
        for one in seen
        for top in [one.address + one.nbytes]
    ]
    axes.add_collection(PolyCollection(corners, gid=gid, zorder=2, **paint), autolim=False)


def _mark_refusal(page: Page, axes: Axes, addresses: Addresses) -> None:
    """Draw a line at the refusal; the request and the largest hole are named at the bottom, where model states lie."""
    assert addresses.refusal is not None
    axes.axvline(addresses.num_events, color=page.theme.text, linewidth=1.3, dashes=(4, 2), zorder=4, gid="refusal")
    words = f"out of memory: {format_bytes(addresses.refusal.nbytes)} of {addresses.refusal.kind}"
    if addresses.room is not None:
        free, hole = addresses.room.free_bytes, addresses.room.largest_hole
        words += f"; {format_bytes(free)} free, largest hole {format_bytes(hole)}"
    end, box, font = (addresses.num_events, 0), ground(page.theme.background, 0.3), page.font(scale=0.9)
    looks = {"ha": "right", "va": "bottom", "zorder": 5, "gid": "refusal label", **font}
    page.write(axes, plain(words), end, (-6, 6), bbox=box, **looks)
