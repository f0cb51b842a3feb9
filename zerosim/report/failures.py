"""What is printed below an out-of-memory error: what was live, what was asked for, and what would fit."""

from __future__ import annotations

from rich.console import RenderableType

from zerosim.errors import OutOfMemory
from zerosim.report.look import Stack, prose, titled
from zerosim.report.tables import kinds_table

MOST_HOLDERS = 3


def out_of_memory(error: OutOfMemory) -> RenderableType:
    """The bytes behind the error, and the advice that came with it."""
    live = sum(error.live.values())
    room = error.capacity - live
    request = (
        f"Asked for: {error.requested:,} B of {error.kind or 'memory'}; "
        f"{live:,} of {error.capacity:,} B were live, so {room:,} B were left."
    )
    return Stack(
        titled(f"Live on rank {error.rank}", kinds_table(error.live)) if error.live else None,
        prose(request),
        room_text(error),
        prose(f"Tried for you: {error.advice or 'no other stage, micro-batch or number of ranks fits'}.", "bold"),
    )


def room_text(error: OutOfMemory) -> RenderableType | None:
    """What the allocator had left, who held the most, and what would help; None where the capacity alone says it."""
    room = error.room
    if room is None:
        return None
    holders = sorted(error.by_unit.items(), key=lambda item: -item[1])[:MOST_HOLDERS]
    held = ", ".join(f"{kind} of {unit or 'the step'} {nbytes:,} B" for (unit, kind), nbytes in holders)
    text = (
        f"The allocator held {room.reserved_bytes:,} B; {room.free_bytes:,} B were free, the largest hole had "
        f"{room.largest_hole:,} B. This request needs a capacity of {room.needed_bytes:,} B."
    )
    return prose(
        text + (f" Held most: {held}." if held else "") + (f" What may help: {room.remedy}." if room.remedy else "")
    )
