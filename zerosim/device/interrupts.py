"""Ctrl-C and other signals that end a program: none is lost, and none interrupts what the one before it began.

One that arrives in a destructor of other code: Python prints an exception that a destructor raises, and continues
without it. zerosim's own buffers are freed without a line of Python (`device/recorder.py`, `Recorder.watch`). Other
objects are not. When a thread object is dropped, for instance, the standard library removes it from a `WeakSet` in a
callback, and each import ends with one. So a swallowed signal is sent again, until one gets through.

One that arrives while the one before it ends a run: it would interrupt a `finally` that removes files. So it changes
nothing.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from zerosim.errors import Ended

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
        nonlocal is_coming, swallowed
        time.sleep(AGAIN_S)
        with lock:
            is_coming = False
            if not is_over and callable(signal.getsignal(number)):  # else it would end the process
                swallowed = 0
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
        if swallowed and signal.getsignal(swallowed) is not signal.SIG_IGN:  # else another one was reported meanwhile
            raise KeyboardInterrupt if swallowed == signal.SIGINT else Ended(swallowed)


def _send(number: int) -> None:
    """Send a signal to the main thread, and wake it if it waits."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        _thread.interrupt_main(signal.Signals(number))


class OneAtATime:
    """A signal handler that raises `Ended`, except while an interrupt is being handled: what it ends is not
    interrupted."""

    def __init__(self, *, postpones: bool = False) -> None:
        self._postpones = postpones
        self.came = 0

    def __call__(self, number: int, frame: object) -> None:
        if self._postpones:
            self.came = number
        elif interrupt_in(sys.exception()) is None:
            raise Ended(number)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise signals inside the block, and one that came before it; postpone those that come after it."""
        self._postpones = False
        try:
            if self.came:
                raise Ended(self.came)
            yield
        finally:
            self._postpones = True


def interrupt_in(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interrupt that an exception is, or during whose handling it was raised. (Python 3.11 itself wraps one
    that arrives in a `__set_name__`.)"""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error


@contextmanager
def signals_postponed() -> Iterator[OneAtATime]:
    """Postpone Ctrl-C, SIGTERM and SIGHUP to the end of the block, except inside `raised()` of the yielded handler.

    No signal interrupts a `finally` around that inner block, in the same function: one that ended the inner block is
    the only one. (A context manager of its own would not do: a signal may arrive before its end begins.) Signals that
    a program ignores or handles itself stay as they are.
    """
    handler, before = OneAtATime(postpones=True), dict[int, Any]()
    if threading.current_thread() is threading.main_thread():
        names = [name for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name)]
        found = {getattr(signal, name): signal.getsignal(getattr(signal, name)) for name in names}
        usual = (signal.SIG_DFL, signal.default_int_handler)
        before = {number: one for number, one in found.items() if one in usual or isinstance(one, OneAtATime)}
    try:
        for number in before:
            signal.signal(number, handler)
        yield handler
    finally:
        for number, one in before.items():  # SIGINT last: it may raise at once
            signal.signal(number, one)
    if handler.came:
        raise Ended(handler.came)
