"""Programs of notebook 03 with the events that their ranks recorded, and pictures of each message.

Legend: N ranks. Source of the ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations", 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerosim.comm.runtime import Context, World, launch
from zerosim.device.events import Event, Launch, Message
from zerosim.device.recorder import Recorder
from zerosim.errors import InputError
from zerosim.lessons.sheet import THEME, Sheet
from zerosim.report.moving import Hop, Moving, moving_ring
from zerosim.report.plots.page import Picture
from zerosim.report.plots.panel import Place
from zerosim.report.plots.style import LINE_PAINTS, ink_on, mixed
from zerosim.tensor import tensor
from zerosim.units import format_bytes

MOST_DRAWN = 6
_PANEL_GAP = 2.0  # between drawings of the ring, in cells


@dataclass(frozen=True, slots=True)
class Recording:
    """The ranks' results, and every event of each, in rank order."""

    results: list[Any]
    events: list[list[Event]]

    @property
    def sent_bytes(self) -> list[int]:
        """The bytes that each rank sent in all."""
        return [sum(event.wire_bytes for event in own if isinstance(event, Launch)) for own in self.events]


def record(program: Callable[[Context], Any], ranks: int, collective: str = "direct") -> Recording:
    """Run `program` on every rank of a new world and keep all events."""
    recorders: dict[int, Recorder] = {}

    def recorded(ctx: Context) -> Any:
        recorders[ctx.rank] = ctx.device.recorder
        return program(ctx)

    results = launch(recorded, World(ranks=ranks, algorithm=collective, keep_events=True))
    return Recording(results, [recorders[rank].history for rank in range(ranks)])


def walk_the_ring(ctx: Context) -> Any:
    """Return this rank's chunks before each hop of a ring all-reduce and at the end: (hops + 1, N)."""
    ranks, rank, device = ctx.world_size, ctx.rank, ctx.device
    chunks = tensor([[10.0**rank]] * ranks, device)
    held = [chunks.numpy().ravel()]
    for hop in range(2 * (ranks - 1)):
        mine, theirs = (rank - 1 - hop) % ranks, (rank - 2 - hop) % ranks
        with device.scope(unit=f"chunk {mine}", slot=hop):
            sending = ctx.comm.launch_send(chunks.buffer[mine], (rank + 1) % ranks)
        row = chunks.buffer[theirs]
        arrived = ctx.comm.recv(row.shape, row.dtype, (rank - 1) % ranks)
        sending.wait()
        row.array[...] = arrived.array + (row.array if hop < ranks - 1 else 0)
        held.append(chunks.numpy().ravel())
    return np.stack(held)


def ring_film(walk: Recording, *, theme: str = "light") -> Moving:
    """Draw the whole ring, moving: as `ring_figure`, hop after hop."""
    results = [[[round(value) for value in row] for row in held] for held in walk.results]
    hops = [
        Hop([held[hop] for held in results], _sent(walk, hop), _sent_bytes(walk, hop))
        for hop in range(len(results[0]) - 1)
    ]
    return moving_ring(hops, [held[-1] for held in results], theme=theme)


def _sent(walk: Recording, hop: int) -> dict[tuple[int, int], int]:
    """Return by rank and chunk its receiver in a hop."""
    return {
        (rank, int(event.scope.unit.removeprefix("chunk "))): event.peer
        for rank, events in enumerate(walk.events)
        for event in events
        if isinstance(event, Message) and event.scope.slot == hop
    }


def _sent_bytes(walk: Recording, hop: int) -> int:
    """Return the bytes that rank 0, like every rank, sent in a hop."""
    return sum(event.nbytes for event in walk.events[0] if isinstance(event, Message) and event.scope.slot == hop)


def ring_figure(walk: Recording, first: int, last: int) -> Picture:
    """Draw every rank's chunks before each hop from `first` to `last - 1`, each hop's messages, and the chunks
    afterwards.

    Rank r's data are 10**r in each of N chunks; its result is an array (hops + 1, N) of its chunks before each hop and
    at the end. It sends chunk c in hop h within `scope(unit="chunk c", slot=h)`.

    Raises: InputError for hops that the ring does not have, and for more ranks than fit.
    """
    ranks, hops = len(walk.results), len(walk.results[0]) - 1
    if not 2 <= ranks <= MOST_DRAWN:
        raise InputError(f"{ranks} ranks in a drawn ring: expected 2 to {MOST_DRAWN}")
    if not 0 <= first < last <= hops:
        raise InputError(f"hops {first} to {last}: expected two rising numbers from 0 to {hops}")
    pitch, columns = ranks + _PANEL_GAP, 2
    rows = -(-(last - first + 1) // columns)
    sheet = Sheet(
        (8.0, max(3.0, 1.2 + 0.36 * rows * pitch)),
        f"A ring of {ranks} ranks, hops {first} to {last - 1} of 0 to {hops - 1}",
        "Columns are ranks, rows are chunks. A digit 1 tells whose part is in a sum: rank 0's is the last digit.",
        across=(-1.6, columns * pitch - 1.6),
        up=(_PANEL_GAP - rows * pitch - 0.2, 1.3),
        notes=["Drawn from the Message events of the ranks. An arrow that leaves on the right comes in on the left."],
    )
    for at, hop in enumerate(range(first, last + 1)):
        sent = _sent(walk, hop) if hop < last else {}
        words = f"before hop {hop}" if hop < last else f"after hop {hop - 1}"
        corner = (at % columns) * pitch, -(at // columns) * pitch
        _draw_ring(sheet, corner, [held[hop] for held in walk.results], sent, words)
    return sheet.picture()


def _draw_ring(
    sheet: Sheet, corner: Place, held: Sequence[Any], sent: Mapping[tuple[int, int], int], words: str
) -> None:
    """Draw one panel: ranks' chunks as a grid whose upper left cell is at `corner`; `sent` has (rank, chunk):
    receiver."""
    ranks, (left, top) = len(held), corner
    full = sum(10**rank for rank in range(ranks))
    done, part = LINE_PAINTS[5].light, mixed(LINE_PAINTS[5].light, THEME.background)
    sheet.write((left + (ranks - 1) / 2, top + 0.95), words, bold=True, scale=0.9)
    for rank in range(ranks):
        sheet.write((left + rank, top - ranks + 0.3), f"rank {rank}", scale=0.75, color=THEME.muted)
        sheet.write((left - 1.2, top - rank), f"chunk {rank}", scale=0.7, color=THEME.muted)
        for chunk, value in enumerate(held[rank]):
            parts = f"{value:.0f}".count("1")
            fill = done if value == full else part if parts > 1 else THEME.band
            heavy = (rank, chunk) in sent
            place = left + rank, top - chunk
            sheet.cell(place, 0.66, 0.74, fill=fill, edge=THEME.text if heavy else THEME.muted, heavy=heavy)
            sheet.write(place, f"{value:.0f}", scale=0.75, bold=heavy, color=ink_on(fill))
    for (rank, chunk), to in sent.items():
        y = top - chunk
        out, into = left + rank + 0.3, left + to - 0.3
        for start, end in [(out, into)] if to > rank else [(out, out + 0.42), (into - 0.42, into)]:  # round the end
            sheet.arrow((start, y), (end, y), color=LINE_PAINTS[1].light)


def matrix_figure(matrices: Mapping[str, Any]) -> Picture:
    """Draw the bytes from each rank to each other: one grid per matrix, senders down, receivers across, each row's sum
    beside it.

    Shapes: (N, N). Raises: InputError for none.
    """
    if not matrices:
        raise InputError("no matrices: nothing to draw; pass at least one")
    most, ranks = max(int(sent.max()) for sent in matrices.values()), max(len(sent) for sent in matrices.values())
    pitch = ranks + 3.0
    sheet = Sheet(
        (8.0, max(3.0, 1.1 + 0.42 * (ranks + 1))),
        "Who sent how much to whom",
        "Rows send, columns receive; right of each row what that rank sent in all.",
        across=(-1.6, pitch * len(matrices) - 0.6),
        up=(-ranks - 0.1, 1.7),
    )
    strong, weak = LINE_PAINTS[3].light, mixed(LINE_PAINTS[3].light, THEME.background)
    for at, (name, sent) in enumerate(matrices.items()):
        left = at * pitch
        sheet.write((left + (len(sent) - 1) / 2, 1.4), name, bold=True)
        for rank, row in enumerate(sent):
            sheet.write((left + rank, 0.72), f"to {rank}", scale=0.75, color=THEME.muted)
            sheet.write((left - 1.0, -rank), f"rank {rank}", scale=0.75, color=THEME.muted)
            sheet.write((left + len(sent) + 0.2, -rank), format_bytes(int(row.sum())), scale=0.8, bold=True)
            for peer, nbytes in enumerate(row.tolist()):
                fill = strong if nbytes == most else weak if nbytes else THEME.band
                sheet.cell((left + peer, -rank), 0.94, 0.9, fill=fill, edge=THEME.background)
                if nbytes:
                    sheet.write((left + peer, -rank), format_bytes(nbytes), scale=0.75, color=ink_on(fill))
    return sheet.picture()
