"""Ctrl-C at chosen lines of code, in the tests' own process."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

from zerosim.device import interrupts


@contextlib.contextmanager
def pressed(at: range, *modules: ModuleType) -> Iterator[tuple[list[int], Callable[..., Any]]]:
    """Ctrl-C at these lines of the modules: yields how many lines there were, in a list, and a trace function. One is
    raised in the block, if any was sent, and the handlers are those from before it then."""
    lines, traced, is_raised = [0], sys.gettrace(), False
    files = {module.__file__ for module in (*modules, interrupts, contextlib, signal)}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        lines[0] += event == "line"
        if event == "line" and lines[0] in at:
            signal.raise_signal(signal.SIGINT)  # where it raises, Python stops tracing
        return trace

    asked = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    old, before = signal.signal(signal.SIGINT, signal.default_int_handler), [signal.getsignal(n) for n in asked]
    try:
        yield lines, trace
    except KeyboardInterrupt:
        is_raised = True
    finally:
        sys.settrace(traced)
        after = [signal.getsignal(number) for number in asked]
        signal.signal(signal.SIGINT, old)
    assert after == before
    assert is_raised == (lines[0] >= at.start)
