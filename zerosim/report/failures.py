"""What is printed below an out-of-memory error: what was live, what was asked for, and what would fit."""

from __future__ import annotations

from rich.console import RenderableType

from zerosim.errors import OutOfMemory
from zerosim.report.look import Stack, prose, titled
from zerosim.report.tables import kinds_table


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
        prose(f"Tried for you: {error.advice or 'no other stage, micro-batch or number of ranks fits'}.", "bold"),
    )
