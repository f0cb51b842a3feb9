"""One call of a function that may do anything, a loop without an end among them.

Owns the thread of such a call. Whole runs are `trial.py`'s; how long one may stand is `watch.py`'s.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from zerosim.grading.ending import end_thread
from zerosim.grading.source import line_of_frame, line_of_trace
from zerosim.grading.watch import PATIENCE_S, POLL_S, Watch
from zerosim.grading.words import error_words, text_of


class Came(NamedTuple):
    """What came of a call: its value, or (`raised`, in words) what it raised, or (`stuck`) nothing in time.

    `unsolved` are the words of a NotImplementedError; `line` is the student's own.
    """

    value: Any = None
    raised: str = ""
    unsolved: str = ""
    stuck: bool = False
    line: str = ""


def called(function: Callable[[], Any], watch: Watch) -> Came:
    """Call it in a thread of its own, which is ended where it stands for PATIENCE_S. Raises nothing of its."""
    came: list[Came] = []

    def call() -> None:
        try:
            came.append(Came(function()))
        except NotImplementedError as error:
            words = text_of(error) or "what raises NotImplementedError"
            came.append(Came(unsolved=words, line=line_of_trace(error.__traceback__)))
        except BaseException as error:  # SystemExit too
            came.append(Came(raised=error_words(error), line=line_of_trace(error.__traceback__)))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    try:
        for _ in range(round(PATIENCE_S / POLL_S)):  # looks, not the clock, as for a run
            thread.join(POLL_S)
            if came:
                return came[0]
            watch.look()
        line = line_of_frame(sys._current_frames().get(thread.ident or 0))
    finally:
        for _ in range(20):  # it may swallow the exception
            if not thread.is_alive():
                break
            end_thread(thread.ident or 0)
            thread.join(POLL_S)
    return Came(stuck=True, line=line)
