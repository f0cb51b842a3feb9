"""An interrupt is never lost: not one that lands in a destructor, which Python ignores."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from processes import posix

from zerosim.comm.runtime import Context, World, launch, launch_alone
from zerosim.config import plan_config
from zerosim.device.device import Kind
from zerosim.device.interrupts import no_interrupt_lost
from zerosim.dtypes import fp32
from zerosim.train.plan import plan


class Interrupted:
    """Its destructor is interrupted."""

    def __del__(self) -> None:
        raise KeyboardInterrupt


class Fails:
    def __del__(self) -> None:
        raise ZeroDivisionError


def test_a_destructor_s_interrupt_ends_a_run_alone_at_the_next_kernel() -> None:
    kernels = 0

    def program(ctx: Context) -> None:
        nonlocal kernels
        buffer = ctx.device.alloc((4,), fp32, Kind.TEMP)
        Interrupted()
        for _ in range(100):
            ctx.device.kernel(0, ctx.device.backend.fill, buffer.array, 0.0)
            kernels += 1

    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        launch_alone(program, World(2, backend="meta"), 0)
    assert kernels == 0
    assert sys.unraisablehook is before


def test_a_destructor_s_interrupt_ends_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One on the caller's thread, where signals arrive."""
    join = threading.Thread.join

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        Interrupted()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", joined)
    with pytest.raises(KeyboardInterrupt):
        launch(lambda ctx: ctx.comm.barrier(), World(2))


@posix
def test_one_that_got_through_when_it_was_sent_again_is_not_raised_a_second_time() -> None:
    before, caught = signal.signal(signal.SIGINT, signal.default_int_handler), 0
    try:
        with no_interrupt_lost():
            Interrupted()
            try:
                while True:
                    time.sleep(0.01)
            except KeyboardInterrupt:
                caught += 1
    except KeyboardInterrupt:
        caught += 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught == 1


def reported(block: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Python reports of destructors during a block."""
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.exc_type))
    block()
    return seen


def test_other_errors_of_destructors_are_reported_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def block() -> None:
        with no_interrupt_lost():
            Fails()

    assert reported(block, monkeypatch) == [ZeroDivisionError]


def test_threads_other_than_the_main_one_change_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    def block() -> None:
        hooks = []

        def elsewhere() -> None:
            with no_interrupt_lost():
                hooks.append(sys.unraisablehook)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert hooks == [sys.unraisablehook]

    assert reported(block, monkeypatch) == []


@posix
@pytest.mark.slow
def test_a_plan_that_is_interrupted_anywhere_ends() -> None:
    """At random moments, among them the deaths of buffers: of 600 such interrupts 33 were lost."""
    config = plan_config(model="gpt2-xl", ranks=64, stage=3)
    plan(config)
    start = time.monotonic()
    plan(config)
    seconds = time.monotonic() - start
    came = 0

    def interrupt(*_: object) -> None:
        nonlocal came
        came += 1
        raise KeyboardInterrupt

    before, draw = signal.signal(signal.SIGALRM, interrupt), random.Random(1)
    lost = caught = 0
    try:
        while caught < 40 and not lost:
            came = 0
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.2, 0.95) * seconds)
                plan(config)
                signal.setitimer(signal.ITIMER_REAL, 0)
                lost += came
            except KeyboardInterrupt:
                caught += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert lost == 0
