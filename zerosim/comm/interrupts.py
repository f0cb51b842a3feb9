"""Ctrl-C that lands in a destructor of somebody else's: Python prints what a destructor raises, and goes on without it.

zerosim's own buffers die without a line of Python (`device/events.py`, `Recorder.watch`). Other things do not. When a
thread is dropped, for instance, the standard library takes it out of a `WeakSet` in a callback.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def no_interrupt_lost(at_once: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of a block in which a destructor swallowed one.

    `at_once` is called where that happens, to end the block early. It runs inside the destructor: it must not raise or
    wait. Whatever else destructors raise is reported as before.
    """
    if threading.current_thread() is not threading.main_thread():  # no signal's handler runs here
        yield
        return
    before, swallowed = sys.unraisablehook, False

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        nonlocal swallowed
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            swallowed = True
            at_once()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
        if swallowed:
            raise KeyboardInterrupt
