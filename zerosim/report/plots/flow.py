"""A slide of the bytes between ranks: for each phase and collective an arrow from each sender to each receiver.

Drawn from the messages of a record: sender, receiver and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from zerosim.device.events import Event, Launch, Message
from zerosim.errors import InputError, wrong
from zerosim.report.names import counted
from zerosim.report.plots.chart import Chart
from zerosim.report.plots.panel import SLIDE, SLIDE_TYPE, Arrow, Axis, Note, Panel
from zerosim.report.plots.style import OP_PAINTS, OTHER_PAINT
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


def flow_figure(result: RunResult, flows: Sequence[Flow], stage: str) -> Chart:
    """Return a panel for each flow, its ranks in a circle, arrows as thick as their bytes.

    Raises: InputError for more ranks or flows than are readable.
    """
    check_ranks(result.config.mesh.ranks)
    if len(flows) > MOST_PANELS:
        raise InputError(f"{len(flows)} kinds of collectives: expected at most {MOST_PANELS} in one picture")
    sent = sum(flow.most_sent for flow in flows)
    how = _HOW.get(result.config.world.algorithm, f"--collective {result.config.world.algorithm}")
    note = f"In one step each GPU sends {format_bytes(sent)} of parameters and gradients: {how}."
    most = max(nbytes for flow in flows for row in flow.sent for nbytes in row)
    row = tuple(_panel(flow, most, 4.2 / len(flows)) for flow in flows)
    said = tuple(f"{flow.phase}, {flow.op}: {_words(flow)[0]}." for flow in flows)
    title = f"{stage}: where the bytes go"
    return Chart(title, run_words({"": result}), (row,), (), (note,), said, SLIDE, largest_type=SLIDE_TYPE)


def _words(flow: Flow) -> list[str]:
    lines = [f"each GPU sends {format_bytes(flow.most_sent)} in {counted(flow.calls, 'call')}"]
    per_arrow = {nbytes for row in flow.sent for nbytes in row if nbytes}
    if len(per_arrow) == 1:
        way = "each way on each arrow" if _is_joined(flow) else "on each arrow"
        lines.append(f"{format_bytes(per_arrow.pop())} {way}")
    return lines


def _is_joined(flow: Flow) -> bool:
    """Return whether one arrow with two heads stands for both ways: of many ranks that send as much as they receive."""
    pairs = product(range(len(flow.sent)), repeat=2)
    return len(flow.sent) > _FEW and all(flow.sent[a][b] == flow.sent[b][a] for a, b in pairs)


def _panel(flow: Flow, most: int, half: float) -> Panel:
    ranks, is_joined = len(flow.sent), _is_joined(flow)
    angles = [math.pi / 2 - 2 * math.pi * rank / ranks + (math.pi / 4 if ranks == 4 else 0) for rank in range(ranks)]
    places = [(math.cos(angle), math.sin(angle)) for angle in angles]
    paint = OP_PAINTS.get(flow.op, OTHER_PAINT)
    arrows = [
        Arrow(places[rank], places[peer], paint, nbytes / most * (0.4 if is_joined else 1.0), is_joined,
              bend=0.14 if flow.sent[peer][rank] and not is_joined else 0.0)
        for rank, row in enumerate(flow.sent)
        for peer, nbytes in enumerate(row)
        if nbytes and (rank < peer or not is_joined)
    ]  # fmt: skip
    cards = [Note(f"gpu{rank}", at, scale=0.85, bold=True, card=OTHER_PAINT) for rank, at in enumerate(places)]
    words = [Note(line, (0, -1.55 - 0.2 * at), scale=0.8) for at, line in enumerate(_words(flow))]
    title = Note(f"{flow.phase}: {flow.op.replace('_', '-')}", (0, 1.5), bold=True)
    return Panel((*arrows, *cards, *words, title), Axis(ends=(-half, half)), Axis(ends=(-1.9, 1.6)), bare=True)
