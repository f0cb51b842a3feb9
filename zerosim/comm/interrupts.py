"""Ctrl-C during a destructor of other code: Python prints an exception that a destructor raises, and continues without
it.

zerosim's own buffers are freed without a line of Python (`device/recorder.py`, `Recorder.watch`). Other objects are
not. When a thread object is dropped, for instance, the standard library removes it from a `WeakSet` in a callback, and
each import ends with one. So a swallowed signal is sent again, until one gets through.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

AGAIN_S = 0.05
"""How long after it was swallowed a signal is sent again."""


@contextmanager
def no_interrupt_lost(at_once: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Send a signal again if a destructor inside the block swallowed its exception; if the block ends first, raise the
    exception there.

    `at_once` is called at that moment, to end the block early. It runs inside the destructor: it must not raise or
    wait. All other exceptions of destructors are reported as before.
    """
    if threading.current_thread() is not threading.main_thread():  # no signal handler runs here
        yield
        return
    before, swallowed, is_coming, is_over = sys.unraisablehook, 0, False, False
    lock = threading.Lock()

    def send_again(number: int) -> None:
        nonlocal is_coming
        time.sleep(AGAIN_S)
        with lock:
            is_coming = False
            if not is_over and callable(signal.getsignal(number)):  # else it would end the process
                _send(number)

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        nonlocal swallowed, is_coming
        error = unraisable.exc_value
        if not isinstance(error, KeyboardInterrupt):
            before(unraisable)
            return
        swallowed = getattr(error, "number", signal.SIGINT)  # an `Ended` has one
        if not is_coming:  # a second one would disturb the handling of the first
            with suppress(RuntimeError):  # no thread can be started: the end of the block raises it
                _thread.start_new_thread(send_again, (swallowed,))
                is_coming = True
        at_once()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        with lock:
            is_over = True
        sys.unraisablehook = before
        if swallowed:
            from zerosim.errors import Ended  # a slow import, during which a signal may arrive

            raise KeyboardInterrupt if swallowed == signal.SIGINT else Ended(swallowed)


def _send(number: int) -> None:
    """Send a signal to the main thread, and wake it if it waits."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        _thread.interrupt_main(signal.Signals(number))
