"""Progress of a run: a bar on a terminal, a line every few steps elsewhere.

Each rank reports its own loss on its own thread; a step is shown when all have reported, with their mean. Steps are
counted from 0, here as in reports, flags, files and the Python API.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from zerosim.report.look import is_terminal, make_console

LINES = 12
"""About how many lines a whole run prints, if it is short."""

SILENT_S = 10.0
"""A long run prints a line at least this often, or whenever a step ends."""

Reporter = Callable[[int, int, float], None]
"""Every rank calls it as reporter(rank, step, loss)."""


def mean_over_ranks(ranks: int, show: Callable[[int, float], None]) -> Reporter:
    """Return a reporter that calls show(step, mean loss) when all ranks have reported a step."""
    reported: dict[int, list[float]] = defaultdict(list)
    lock = threading.Lock()

    def report(rank: int, step: int, loss: float) -> None:
        with lock:
            reported[step].append(loss)
            if len(reported[step]) == ranks:
                show(step, math.fsum(reported.pop(step)) / ranks)

    return report


@contextmanager
def progress_on(
    stream: TextIO, ranks: int, steps: int | None, title: str, *, quiet: bool = False
) -> Iterator[Reporter]:
    """Show steps during a block, as suits the stream. `steps` is None if it is not known beforehand.

    A terminal is left as it was, however the block ends.
    """

    def at(step: int) -> str:
        return f"step {step}" if steps is None else f"step {step:>{len(str(steps - 1))}} of {steps}"

    said_at = time.monotonic()

    def print_line(step: int, loss: float) -> None:
        nonlocal said_at
        is_due = time.monotonic() - said_at > SILENT_S
        if is_due or step % max(1, (steps or 10 * LINES) // LINES) == 0 or step + 1 == steps:
            said_at = time.monotonic()
            print(f"{title}  {at(step)}  loss {loss:.4f}", file=stream, flush=True)

    console = make_console(stream)
    if quiet:
        yield lambda rank, step, loss: None
    elif is_terminal(stream) and not console.is_dumb_terminal:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1, max_width=40)),
            TextColumn("{task.fields[at]}"),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            console=console,
            expand=False,
        )
        task = bar.add_task(title, total=steps, at=at(0), loss="-.----")
        with bar:
            yield mean_over_ranks(
                ranks, lambda step, loss: bar.update(task, completed=step + 1, at=at(step), loss=f"{loss:.4f}")
            )
    else:
        yield mean_over_ranks(ranks, print_line)
