"""The text below an out-of-memory error: the live bytes, the request, and what would fit."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import RenderableType

from zerosim.comm.rank_status import numbers_text
from zerosim.errors import OutOfMemory
from zerosim.placement.memories import DEVICE
from zerosim.report.look import Adaptive, Grid, Stack, prose, right, titled
from zerosim.report.tables import kinds_table

MOST_HOLDERS = 3


def out_of_memory(error: OutOfMemory) -> RenderableType:
    """Return the bytes behind the error, and the advice that came with it."""
    live = sum(error.live.values())
    room = error.capacity - live
    request = (
        f"Asked for: {error.requested:,} B of {error.kind or 'memory'}; "
        f"{live:,} of {error.capacity:,} B were live, so {room:,} B were left."
    )
    advice = f"Tried for you: {error.advice or 'no other stage, microbatch or number of ranks fits'}."
    if error.advice is None:
        advice = "zerosim plan with these flags tries what would fit."
    if error.memory != DEVICE:
        request = f"Asked for: {error.requested:,} B of {error.kind}." if error.requested else ""
        advice = "A node's ranks share this memory. What helps: fewer ranks on a node, or less offloaded state there: "
        advice += "zerosim fit --find offload shows the memory of each way."
    return Stack(
        titled(f"Live on rank {error.rank}", kinds_table(error.live)) if error.live else None,
        _held(error.held) if error.held else None,
        prose(request) if request else None,
        room_text(error),
        prose(advice, "bold"),
    )


def _held(held: Mapping[int, int]) -> RenderableType:
    """Return the most that each rank of a node holds of its memory; ranks with the same bytes share a line."""
    alike: dict[int, list[int]] = {}
    for rank, nbytes in sorted(held.items()):
        alike.setdefault(nbytes, []).append(rank)
    grid = Grid("ranks", right("each"), right("together"))
    for nbytes, ranks in alike.items():
        grid.add(numbers_text(ranks), f"{nbytes:,}", f"{nbytes * len(ranks):,}")
    return titled("Most bytes held on the node", Adaptive(grid.filled()))


def room_text(error: OutOfMemory) -> RenderableType | None:
    """Return the allocator's free memory, the largest holders, and a remedy; None if the capacity alone explains the
    error."""
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
