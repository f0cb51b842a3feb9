"""Progress of a run: a bar where there is a terminal, a line every few steps where there is none.

Each rank reports its own loss on its own thread; a step is shown when all have, with their mean. Steps are
counted from 0, here as in reports, flags, files and the Python API.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from typing import TextIO

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from zerosim.report.look import is_terminal, make_console

LINES = 12
"""About how many lines a whole run prints."""


class Reporter:
    """Called as reporter(rank, step, loss). This one prints nothing; `show` is what others do with a step."""

    def __init__(self, ranks: int, steps: int | None, title: str) -> None:
        self.steps = steps
        self.title = title
        self._ranks = ranks
        self._losses: dict[int, list[float]] = defaultdict(list)
        self._lock = threading.Lock()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *failure: object) -> None: ...

    def __call__(self, rank: int, step: int, loss: float) -> None:
        with self._lock:
            losses = self._losses[step]
            losses.append(loss)
            if len(losses) == self._ranks:
                self.show(step, math.fsum(self._losses.pop(step)) / self._ranks)

    def show(self, step: int, loss: float) -> None: ...


class Lines(Reporter):
    """'step 10 of 60  loss 3.412', a dozen times in a run."""

    def __init__(self, ranks: int, steps: int | None, title: str, stream: TextIO) -> None:
        super().__init__(ranks, steps, title)
        self._stream = stream
        self._every = max(1, (steps or 10 * LINES) // LINES)

    def show(self, step: int, loss: float) -> None:
        is_last = self.steps is not None and step == self.steps - 1
        if is_last or step % self._every == 0:
            print(f"{self.title}  {_at(step, self.steps)}  loss {loss:.4f}", file=self._stream, flush=True)


class Bar(Reporter):
    """A bar with step, loss and time; the terminal is left as it was, however the run ends."""

    def __init__(self, ranks: int, steps: int | None, title: str, stream: TextIO) -> None:
        super().__init__(ranks, steps, title)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1, max_width=40)),
            TextColumn("{task.fields[at]}"),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            console=make_console(stream),
            expand=False,
        )
        self._task = self._bar.add_task(title, total=steps, at=_at(0, steps), loss="-.----")

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._bar.stop()

    def show(self, step: int, loss: float) -> None:
        self._bar.update(self._task, completed=step + 1, at=_at(step, self.steps), loss=f"{loss:.4f}")


def _at(step: int, steps: int | None) -> str:
    return f"step {step}" if steps is None else f"step {step:>{len(str(steps - 1))}} of {steps}"


def make_reporter(ranks: int, steps: int | None, title: str, stream: TextIO, *, quiet: bool = False) -> Reporter:
    """What suits the stream. `steps` is None where it is not known beforehand."""
    if quiet:
        return Reporter(ranks, steps, title)
    console = make_console(stream)
    if is_terminal(stream) and not console.is_dumb_terminal:
        return Bar(ranks, steps, title, stream)
    return Lines(ranks, steps, title, stream)
