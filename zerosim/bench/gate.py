"""A gate that lets the ranks of a training run go on one step at a time (`training.py`)."""

from __future__ import annotations

import threading


class Gate:
    """Ranks wait here between two steps. `open` lets them do one."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._allowed = 0
        self._arrived = -1
        self.closed = False

    def arrive(self, step: int) -> bool:
        """Wait for one more step, on a rank's thread, after all ranks have done `step` steps. Return False if there is
        none."""
        with self._change:
            self._arrived = max(self._arrived, step)
            self._change.notify_all()
            self._change.wait_for(lambda: self._allowed > step or self.closed)
            return not self.closed

    def open(self) -> None:
        """Let all ranks do one step, on the benchmark's thread, and wait until rank 0 saw all of them finish it."""
        with self._change:
            self._change.wait_for(lambda: self._arrived == self._allowed or self.closed)
            self._allowed += 1
            self._change.notify_all()
            self._change.wait_for(lambda: self._arrived == self._allowed or self.closed)

    def close(self) -> None:
        """End the steps: waiting ranks go on and finish."""
        with self._change:
            self.closed = True
            self._change.notify_all()
