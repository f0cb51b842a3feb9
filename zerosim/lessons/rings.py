"""A ring walked hop by hop, and what collectives send, read from the events that ranks recorded.

Owns the ring written out with send and recv (`comm/algorithms/ring.py` has the one that runs use), and the
pictures of notebook 03. Counts nothing by formula.

Legend: N ranks, c elements per chunk. Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.comm.runtime import Context, World, launch
from zerosim.device.events import Event, Message, Recorder
from zerosim.errors import InputError
from zerosim.ledger.traffic import CommLedger
from zerosim.lessons.sheet import Sheet, arrow, cell, ink_on, open_sheet, picture, write
from zerosim.report.plots.page import Picture
from zerosim.report.plots.style import LINE_PAINTS, mixed
from zerosim.tensor.tensor import Tensor, tensor
from zerosim.units import format_bytes

MOST_DRAWN = 6
_PANEL_GAP = 2.0  # between drawings of the ring, in cells


@dataclass(frozen=True, slots=True)
class Recording:
    """What the ranks returned, and every event of each, in rank order."""

    results: list[Any]
    events: list[list[Event]]

    @property
    def sent_bytes(self) -> list[int]:
        """What each rank put on the wire, added up by the ledger."""
        totals = []
        for history in self.events:
            ledger = CommLedger()
            ledger.read(history)
            totals.append(sum(row.wire_bytes for row in ledger.rows()))
        return totals


def record(program: Callable[[Context], Any], ranks: int, collective: str = "direct") -> Recording:
    """Run `program` on every rank of a new world and keep all events."""
    recorders: dict[int, Recorder] = {}

    def watched(ctx: Context) -> Any:
        recorders[ctx.rank] = ctx.device.recorder
        return program(ctx)

    results = launch(watched, World(ranks=ranks, collective=collective, keep_events=True))
    return Recording(results, [recorders[rank].history for rank in range(ranks)])


def ring_hop(ctx: Context, chunks: Tensor, hop: int) -> None:
    """One hop of a ring all-reduce: N-1 hops add what comes in, N-1 put it.

    Shapes: chunks (N, c), changed in place. After hop N-2 row r of rank r
    is the sum over all ranks.
    """
    n, rank = ctx.world_size, ctx.rank
    mine, theirs = (rank - 1 - hop) % n, (rank - 2 - hop) % n
    # The scope: so that the record says which chunk, and when.
    with ctx.device.scope(unit=f"chunk {mine}", slot=hop):
        right = (rank + 1) % n
        sending = ctx.comm.launch_send(chunks.buffer[mine], right)
    row = chunks.buffer[theirs]
    arrived = ctx.comm.recv(row.shape, row.dtype, (rank - 1) % n)
    sending.wait()
    into, backend = row.array, ctx.device.backend
    if hop < n - 1:
        add = backend.add
        ctx.device.kernel(row.numel, add, arrived.array, into, into)
    else:
        ctx.device.kernel(0, backend.copy, arrived.array, into)


def ring_walk(ranks: int) -> Recording:
    """A ring all-reduce of N elements, one per chunk; each rank returns what it held before each hop, and at the end.

    Rank r's elements are all 10**r: a digit 1 in a sum tells whose part is in it. Results: N arrays (2N-1, N).

    Raises: InputError for fewer than 2 ranks or more than fit a picture.
    """
    if not 2 <= ranks <= MOST_DRAWN:
        raise InputError(f"{ranks} ranks in a drawn ring: expected 2 to {MOST_DRAWN}")

    def program(ctx: Context) -> Any:
        chunks = tensor(np.full((ranks, 1), 10.0**ctx.rank), ctx.device)
        held = [chunks.numpy().copy()]
        for hop in range(2 * (ranks - 1)):
            ring_hop(ctx, chunks, hop)
            held.append(chunks.numpy().copy())
        return np.stack(held)[:, :, 0]

    return record(program, ranks)


@dataclass(frozen=True, slots=True)
class Sent:
    """A message as its sender recorded it: in which hop, from whom to whom, which chunk, how many bytes."""

    hop: int
    src: int
    dst: int
    chunk: int
    nbytes: int


def ring_messages(walk: Recording) -> list[Sent]:
    """Every message of a `ring_walk`, by hop and sender: read from the ranks' Message events."""
    found = [
        Sent(event.scope.slot, rank, event.peer, int(event.scope.unit.removeprefix("chunk ")), event.nbytes)
        for rank, history in enumerate(walk.events)
        for event in history
        if isinstance(event, Message)
    ]
    return sorted(found, key=lambda sent: (sent.hop, sent.src))


def ring_figure(walk: Recording, first: int, last: int) -> Picture:
    """What every rank holds before each hop from `first` to `last - 1`, who sends what in it, what there is after.

    Raises: InputError for hops that the walk does not have.
    """
    ranks, hops = len(walk.results), len(walk.results[0]) - 1
    if not 0 <= first < last <= hops:
        raise InputError(f"hops {first} to {last}: expected two rising numbers from 0 to {hops}")
    messages = ring_messages(walk)
    panels = list(range(first, last + 1))
    columns = 2
    rows = -(-len(panels) // columns)
    across = columns * (ranks + _PANEL_GAP)
    sheet = open_sheet(
        f"A ring of {ranks} ranks, hops {first} to {last - 1} of 0 to {hops - 1}",
        "Columns are ranks, rows are chunks. A digit 1 tells whose part is in a sum: rank 0's is the last digit.",
        across=(-1.6, across - 1.6),
        up=(_PANEL_GAP - rows * (ranks + _PANEL_GAP) - 0.2, 1.3),
        size=(8.0, max(3.0, 1.2 + 0.36 * rows * (ranks + _PANEL_GAP))),
        notes=["Drawn from the Message events of the ranks. An arrow that leaves on the right comes in on the left."],
    )
    for at, hop in enumerate(panels):
        left, top = (at % columns) * (ranks + _PANEL_GAP), -(at // columns) * (ranks + _PANEL_GAP)
        sent = [message for message in messages if message.hop == hop] if hop < last else []
        words = f"before hop {hop}" if hop < last else f"after hop {hop - 1}"
        _draw_ring(sheet, (left, top), [held[hop] for held in walk.results], sent, words)
    return picture(sheet)


def _draw_ring(
    sheet: Sheet, corner: tuple[float, float], held: Sequence[Any], sent: Sequence[Sent], words: str
) -> None:
    """One panel: ranks' chunks as a grid whose upper left cell is at `corner`, and the messages of a hop."""
    theme, ranks = sheet.page.theme, len(held)
    (left, top), full = corner, sum(10**rank for rank in range(ranks))
    done, part = theme.color(LINE_PAINTS[5]), mixed(theme.color(LINE_PAINTS[5]), theme.background)
    sending = {(message.src, message.chunk) for message in sent}
    write(sheet, (left + (ranks - 1) / 2, top + 0.95), words, bold=True, scale=0.9)
    for rank in range(ranks):
        write(sheet, (left + rank, top - ranks + 0.3), f"rank {rank}", scale=0.75, color=theme.muted)
        write(sheet, (left - 1.2, top - rank), f"chunk {rank}", scale=0.7, color=theme.muted)
        for chunk, value in enumerate(held[rank]):
            parts = f"{value:.0f}".count("1")
            fill = done if value == full else part if parts > 1 else theme.band
            heavy = (rank, chunk) in sending
            place = left + rank, top - chunk
            cell(sheet, place, 0.66, 0.74, fill=fill, edge=theme.text if heavy else theme.muted, heavy=heavy)
            write(sheet, place, f"{value:.0f}", scale=0.75, bold=heavy, color=ink_on(fill))
    for message in sent:
        y, color = top - message.chunk, theme.color(LINE_PAINTS[1])
        if message.dst > message.src:
            arrow(sheet, (left + message.src + 0.3, y), (left + message.dst - 0.3, y), color=color)
        else:  # round the end
            arrow(sheet, (left + message.src + 0.3, y), (left + message.src + 0.72, y), color=color)
            arrow(sheet, (left + message.dst - 0.72, y), (left + message.dst - 0.3, y), color=color)


def sent_matrix(recording: Recording) -> Any:
    """Bytes that left each rank (row) for each other (column), from the Message events. Shapes: (N, N)."""
    ranks = len(recording.events)
    sent = np.zeros((ranks, ranks), np.int64)
    for rank, history in enumerate(recording.events):
        for event in history:
            if not isinstance(event, Message):
                continue
            if event.peer >= 0:
                sent[rank, event.peer] += event.nbytes * event.count
            elif event.count == ranks - 1:
                sent[rank] += event.nbytes
                sent[rank, rank] -= event.nbytes
            else:
                raise InputError(
                    f"rank {rank} sent to {event.count} of {ranks - 1} others, unnamed: use lengths that N divides"
                )
    return sent


def matrix_figure(recordings: dict[str, Recording]) -> Picture:
    """Who sent how much to whom: one grid per recording, senders down, receivers across, each row's sum beside it."""
    if not recordings:
        raise InputError("no recordings: there is nothing to draw; give at least one")
    matrices = {name: sent_matrix(recording) for name, recording in recordings.items()}
    most, ranks = max(int(sent.max()) for sent in matrices.values()), max(len(sent) for sent in matrices.values())
    pitch = ranks + 3.0
    sheet = open_sheet(
        "Who sent how much to whom",
        "Rows send, columns receive; right of each row what that rank sent in all.",
        across=(-1.6, pitch * len(matrices) - 0.6),
        up=(-ranks - 0.1, 1.7),
        size=(8.0, max(3.0, 1.1 + 0.42 * (ranks + 1))),
    )
    theme = sheet.page.theme
    strong, weak = theme.color(LINE_PAINTS[3]), mixed(theme.color(LINE_PAINTS[3]), theme.background)
    for at, (name, sent) in enumerate(matrices.items()):
        left = at * pitch
        write(sheet, (left + (len(sent) - 1) / 2, 1.4), name, bold=True)
        for rank, row in enumerate(sent):
            write(sheet, (left + rank, 0.72), f"to {rank}", scale=0.75, color=theme.muted)
            write(sheet, (left - 1.0, -rank), f"rank {rank}", scale=0.75, color=theme.muted)
            write(sheet, (left + len(sent) + 0.2, -rank), format_bytes(int(row.sum())), scale=0.8, bold=True)
            for peer, nbytes in enumerate(row.tolist()):
                fill = strong if nbytes == most else weak if nbytes else theme.band
                cell(sheet, (left + peer, -rank), 0.94, 0.9, fill=fill, edge=theme.background)
                if nbytes:
                    write(sheet, (left + peer, -rank), format_bytes(nbytes), scale=0.75, color=ink_on(fill))
    return picture(sheet)
