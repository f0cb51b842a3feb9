"""Ending threads that nobody has asked to end: an exception is put into them, at their next line of Python.

Owns that way out. A thread in C code has no next line: then its process is ended (`apart.py`).
"""

from __future__ import annotations

import ctypes
import sys
import time

from zerosim.grading.watch import POLL_S
from zerosim.grading.watched import Over


def end_thread(number: int, error: type[BaseException] = Over) -> None:
    """A thread in a loop of its own looks at no switch: an exception is put into it, at its next line."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(number), ctypes.py_object(error))


def end_left(before: set[int]) -> None:
    """Threads that the strategy has started, and that would take time from what follows."""
    for _ in range(20):
        left = set(sys._current_frames()) - before
        if not left:
            return
        for number in left:
            end_thread(number, SystemExit)  # of which threading says nothing
        time.sleep(POLL_S)
