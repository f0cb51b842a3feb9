"""One rank of a run beside the same rank of a reference: live bytes, and below them every collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from zerosim.device.events import Event, Launch
from zerosim.report.plots.axes import EVENTS, bytes_axis, events_axis
from zerosim.report.plots.history import read_history
from zerosim.report.plots.page import Page, Picture, dress, finish, frame, ground, inches, open_page, plain
from zerosim.report.plots.style import KIND_PAINTS, OP_PAINTS, OTHER_PAINT, in_order
from zerosim.report.plots.timeline import draw_panel, draw_strip, mark_peak, set_heights, strips
from zerosim.units import format_bytes


class Calls(NamedTuple):
    """A step's collectives and messages: by event, counted from the first one shown, the operation and its payload."""

    at: list[int]
    ops: list[str]
    nbytes: list[int]

    @property
    def words(self) -> str:
        """'12 calls, 161 KB'."""
        return f"{len(self.at)} call{'s' * (len(self.at) != 1)}, {format_bytes(sum(self.nbytes))}"


def beside_figure(
    records: Sequence[Sequence[Event]],
    names: Sequence[str],
    rank: int,
    step: int,
    *,
    title: str,
    subtitle: str = "",
    event: int | None = None,
    theme: str = "light",
    size: tuple[float, float] | None = None,
) -> Picture:
    """Draw one rank's step of several runs, one below the other, on the same axes.

    `records` are the rank's whole records, `names` the runs'. `event` is a place in the first record, which is marked.
    Raises: InputError for a step that a record does not have, an unknown theme.
    """
    histories = [read_history(record, step) for record in records]
    calls = [_calls(record, step) for record in records]
    page = open_page(size, theme, (8.0, 2.2 + 2.4 * len(records)))
    live = [pair for history in histories for pair in zip(history.kinds, history.live, strict=True)]
    kinds = in_order(dict.fromkeys(kind for kind, nbytes in live if nbytes.any()), KIND_PAINTS)
    ops = in_order(dict.fromkeys(op for one in calls for op in one.ops), OP_PAINTS)
    key = [(kind, page.paint(kind, KIND_PAINTS)) for kind in kinds] + [(op, page.paint(op, OP_PAINTS)) for op in ops]
    notes = [f"Rank {rank}, step {step}. Above: live bytes. Below: the payload of each collective and message."]
    frame(page, title, subtitle, key, notes)
    rows = page.figure.subplots(
        2 * len(records), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [3, 1] * len(records)}
    )[:, 0]
    panels, below = list(rows[::2]), list(rows[1::2])
    for axes in (*panels[1:], *below[1:]):
        axes.sharey(panels[0] if axes in panels else below[0])
    most = max(history.peak.nbytes for history in histories) or 1
    largest = max((nbytes for one in calls for nbytes in one.nbytes), default=1) or 1
    shown = max(history.num_events for history in histories)
    for name, history, call, axes, under in zip(names, histories, calls, panels, below, strict=True):
        draw_panel(page, axes, history, kinds, most)
        axes.set_ylabel(plain(name), color=page.theme.text, **page.font())
        _draw_calls(page, under, call, largest, shown)
    rows[-1].set_xlabel(EVENTS, color=page.theme.muted, **page.font(scale=0.9))
    panels[0].set_xlim(0, shown)
    events_axis(page, rows[-1])
    num_strips = strips(page, panels[0])
    set_heights(page, panels[0], most, None, num_strips)
    finish(page)
    for history, axes, under, call in zip(histories, panels, below, calls, strict=True):
        for row, spans in enumerate((history.phases, history.units)[:num_strips]):
            draw_strip(page, axes, spans, row, banded=row == 0)
        mark_peak(page, axes, history, step, 0)
        page.write(under, call.words, (1, 1), (0, 1), xycoords="axes fraction", ha="right", va="bottom",
                   color=page.theme.muted, **page.font(scale=0.8))  # fmt: skip
    if event is not None:
        _mark_event(page, (panels[0], below[0]), records[0], event, step)
    assert isinstance(page.figure, Picture)  # by open_page
    return page.figure


def _calls(record: Sequence[Event], step: int) -> Calls:
    shown = [event for event in record if event.scope.step == step]
    rows = [(at, event) for at, event in enumerate(shown) if isinstance(event, Launch) and event.payload_bytes]
    return Calls([at for at, _ in rows], [e.op for _, e in rows], [e.payload_bytes for _, e in rows])


def _draw_calls(page: Page, axes: Axes, calls: Calls, largest: int, shown: int) -> None:
    """Draw bars of one width, as high as the payload. A small payload still has a visible height."""
    dress(page, axes, grid="y")
    bytes_axis(axes.yaxis, largest, 2)
    axes.set_ylim(0, 1.25 * largest)
    for op in dict.fromkeys(calls.ops):
        chosen = [(at, nbytes) for at, name, nbytes in zip(*calls, strict=True) if name == op]
        paint = OP_PAINTS.get(op, OTHER_PAINT)
        heights = [max(nbytes, 0.06 * largest) for _, nbytes in chosen]
        axes.bar([at for at, _ in chosen], heights, width=max(1.0, 0.006 * shown), align="edge", linewidth=0,
                 color=page.theme.color(paint), gid=f"calls.{op}")  # fmt: skip


def _mark_event(page: Page, panels: Sequence[Axes], record: Sequence[Event], event: int, step: int) -> None:
    """Mark the event that the grade names, with a line across both panels of a run."""
    first = next(number for number, one in enumerate(record) if one.scope.step == step)
    at = event - first + 0.5
    for axes in panels:
        axes.axvline(at, color=page.theme.text, linewidth=1.2, dashes=(3, 2), zorder=5, gid="grade points here")
    words, room = f"event {event}", inches(page, panels[0])[0]
    is_right = at / panels[0].get_xlim()[1] * room + page.width(words) + 0.2 > room
    looks = {"ha": "right" if is_right else "left", "va": "bottom", "bbox": ground(page.theme.background)}
    looks |= page.font(scale=0.85, bold=True)
    across = panels[0].get_xaxis_transform()
    page.write(panels[0], words, (at, 0), (-5 if is_right else 5, 4), xycoords=across, zorder=7, **looks)
