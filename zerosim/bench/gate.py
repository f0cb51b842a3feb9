"""The gate through which the ranks of a training run go, one step at a time (`training.py`)."""

from __future__ import annotations

import threading


class Gate:
    """Where ranks stand between two steps; opened for one step at a time."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._allowed = 0
        self._arrived = -1
        self.closed = False

    def arrive(self, step: int) -> bool:
        """On a rank's thread, once all ranks have done `step` steps: wait for one more. False: there is none."""
        with self._change:
            self._arrived = max(self._arrived, step)
            self._change.notify_all()
            self._change.wait_for(lambda: self._allowed > step or self.closed)
            return not self.closed

    def open(self) -> None:
        """On the benchmark's thread: let all ranks do one step, and wait until the first saw that all had done it."""
        with self._change:
            self._change.wait_for(lambda: self._arrived == self._allowed or self.closed)
            self._allowed += 1
            self._change.notify_all()
            self._change.wait_for(lambda: self._arrived == self._allowed or self.closed)

    def close(self) -> None:
        """No more steps: whoever waits goes on and ends."""
        with self._change:
            self.closed = True
            self._change.notify_all()
