"""A slide of the bytes between ranks: for each phase and collective an arrow from each sender to each receiver.

Drawn from the messages of a record: sender, receiver and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from zerosim.device.events import Event, Launch, Message
from zerosim.errors import InputError, wrong
from zerosim.report.names import counted
from zerosim.report.plots.page import describe, finish
from zerosim.report.plots.slide import Slide
from zerosim.report.plots.style import OP_PAINTS, OTHER_PAINT, ink_on
from zerosim.report.plots.words import run_words
from zerosim.train.result import RunResult
from zerosim.units import format_bytes

MOST_RANKS = 8
MOST_PANELS = 4
_FEW = 4  # ranks between which there is room for an arrow each way
_HOW = {"direct": "to all others, in one round", "ring": "to its neighbour, in many hops"}


class Flow(NamedTuple):
    """One operation in one phase of a step: bytes from each rank (row) to each other, and calls of a rank."""

    phase: str
    op: str
    sent: list[list[int]]
    calls: int

    @property
    def most_sent(self) -> int:
        return max(sum(row) for row in self.sent)

    def to_dict(self) -> dict[str, Any]:
        return self._asdict()


def check_ranks(ranks: int) -> None:
    """Check the number of ranks. Raises: InputError for more than are readable."""
    if ranks > MOST_RANKS:
        raise wrong("ranks", f" {ranks}: one picture holds at most {MOST_RANKS}; choose {MOST_RANKS} or fewer")


def read_flows(events: Sequence[Sequence[Event]], step: int = 0, purpose: str = "states") -> list[Flow]:
    """Return the messages of one step in all ranks' records, in the order of its phases. `events` are by rank, every
    one's own.

    Raises: InputError for a step without messages.
    """
    found: dict[tuple[str, str], Flow] = {}
    for rank, own in enumerate(events):
        calls = {event.work: event for event in own if isinstance(event, Launch) and event.purpose == purpose}
        for call in calls.values():
            if call.scope.step == step:
                empty = Flow(call.scope.phase, call.op, [[0] * len(events) for _ in events], 0)
                flow = found.setdefault((call.scope.phase, call.op), empty)
                found[call.scope.phase, call.op] = flow._replace(calls=flow.calls + (rank == 0))
        for event in own:
            if isinstance(event, Message) and event.scope.step == step and event.work in calls:
                launch = calls[event.work]
                row = found[launch.scope.phase, launch.op].sent[rank]
                others = [peer for peer in launch.group if peer != rank]
                for peer in others if event.peer < 0 else [event.peer]:
                    row[peer] += event.nbytes * (1 if event.peer < 0 else event.count)
    if not any(flow.most_sent for flow in found.values()):
        raise InputError("nothing is sent between ranks: there is no flow to draw; choose --ranks 2 or more")
    return list(found.values())


def flow_figure(
    result: RunResult,
    flows: Sequence[Flow],
    stage: str,
    *,
    theme: str = "light",
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw a panel for each flow, its ranks in a circle, arrows as thick as their bytes.

    Raises: InputError for more ranks or flows than are readable.
    """
    check_ranks(result.config.mesh.ranks)
    if len(flows) > MOST_PANELS:
        raise InputError(f"{len(flows)} kinds of collectives: expected at most {MOST_PANELS} in one picture")
    sent = sum(flow.most_sent for flow in flows)
    how = _HOW.get(result.config.world.algorithm, f"--collective {result.config.world.algorithm}")
    notes = [f"In one step each GPU sends {format_bytes(sent)} of parameters and gradients: {how}."]
    slide = Slide(f"{stage}: where the bytes go", run_words({"": result}), (), notes, theme=theme, size=size)
    wide = slide.width / len(flows)
    most = max(nbytes for flow in flows for row in flow.sent for nbytes in row)
    for at, flow in enumerate(flows):
        middle = (at + 0.5) * wide
        color = slide.page.theme.color(OP_PAINTS.get(flow.op, OTHER_PAINT))
        slide.write(f"{flow.phase}: {flow.op.replace('_', '-')}", (middle, slide.height - 0.7 * slide.em), bold=True)
        per_arrow = {nbytes for row in flow.sent for nbytes in row if nbytes}
        lines = [f"each GPU sends {format_bytes(flow.most_sent)} in {counted(flow.calls, 'call')}"]
        if len(per_arrow) == 1:
            way = "each way on each arrow" if _is_joined(flow) else "on each arrow"
            lines.append(f"{format_bytes(per_arrow.pop())} {way}")
        for row, words in enumerate(lines):
            slide.write(words, (middle, (1.9 - 1.3 * row) * slide.em), scale=0.8)
        top, bottom = slide.height - 1.8 * slide.em, 3.0 * slide.em
        radius = min(0.36 * wide, (top - bottom) / 2 - 1.2 * slide.em)
        _draw_ring(slide, (middle, (top + bottom) / 2), radius, flow, most, color)
        describe(slide.page, f"{flow.phase}, {flow.op}: {lines[0]}.")
    return finish(slide.page)


def _is_joined(flow: Flow) -> bool:
    """Return whether one arrow with two heads stands for both ways: of many ranks that send as much as they receive."""
    pairs = product(range(len(flow.sent)), repeat=2)
    return len(flow.sent) > _FEW and all(flow.sent[a][b] == flow.sent[b][a] for a, b in pairs)


def _draw_ring(slide: Slide, center: tuple[float, float], radius: float, flow: Flow, most: int, color: str) -> None:
    ranks = len(flow.sent)
    angles = [math.pi / 2 - 2 * math.pi * rank / ranks + (math.pi / 4 if ranks == 4 else 0) for rank in range(ranks)]
    places = [(center[0] + radius * math.cos(angle), center[1] + radius * math.sin(angle)) for angle in angles]
    high, theme = 1.6 * slide.em, slide.page.theme
    width = slide.page.width(f"gpu{ranks - 1}", **slide.page.font(scale=0.85, bold=True)) + 0.9 * slide.em
    is_joined, scale = _is_joined(flow), 1.0 if ranks <= _FEW else 0.6
    for rank, row in enumerate(flow.sent):
        for peer, nbytes in enumerate(row):
            if nbytes and (rank < peer or not is_joined):
                away = 0.0 if is_joined or not flow.sent[peer][rank] else 0.28 * slide.em
                start, end = _apart(places[rank], places[peer], away, width, high)
                heads = "<|-|>" if is_joined else "-|>"
                style = {
                    "arrowstyle": f"{heads},head_width=0.28,head_length=0.6", "color": color, "shrinkA": 0,
                    "shrinkB": 0, "linewidth": scale * (1.0 + 1.6 * nbytes / most),
                    "mutation_scale": scale * slide.page.points,
                }  # fmt: skip
                slide.axes.annotate("", end, xytext=start, arrowprops=style, annotation_clip=False)
    fill = theme.color(OTHER_PAINT)
    for rank, place in enumerate(places):
        slide.card(place, width, high, facecolor=fill, edgecolor=theme.background, linewidth=1.0, zorder=4)
        slide.write(f"gpu{rank}", place, scale=0.85, bold=True, color=ink_on(fill), zorder=5)


def _apart(
    start: tuple[float, float], end: tuple[float, float], away: float, width: float, high: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Draw an arrow between two boxes, beside the one that goes back: from border to border."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = math.hypot(dx, dy)
    across = -dy / length * away, dx / length * away
    border = min(width / 2 / abs(dx) if dx else math.inf, high / 2 / abs(dy) if dy else math.inf)
    border += (0.03 + 0.5 * away) / length
    moved = [(x + across[0], y + across[1]) for x, y in (start, end)]
    (x0, y0), (x1, y1) = moved
    return (x0 + dx * border, y0 + dy * border), (x1 - dx * border, y1 - dy * border)
