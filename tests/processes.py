"""Processes that tests start: none is waited for without end, and none is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SECONDS = 600.0
"""How long a process may take that takes seconds on a quiet machine."""

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX: a shell, signals, links or modes of files")


def started(words: Sequence[str | Path], **options: Any) -> subprocess.Popen[str]:
    """A process in a session of its own, for `ended`. It dies by itself after `SECONDS` of the processor's time, should
    its test be killed."""
    process = subprocess.Popen(words, start_new_session=True, **{"encoding": "utf-8", **options})
    with contextlib.suppress(ImportError, AttributeError, ProcessLookupError):  # Linux only
        import resource

        resource.prlimit(process.pid, resource.RLIMIT_CPU, (int(SECONDS), int(SECONDS)))
    return process


@contextmanager
def ended(process: subprocess.Popen[Any], seconds: float = SECONDS) -> Iterator[subprocess.Popen[Any]]:
    """The process, and its session if it has one of its own, is gone at the end of the block; within it, after
    `seconds` at the latest: no read of it hangs."""
    has_session = os.name == "posix" and os.getpgid(process.pid) == process.pid

    def kill() -> None:
        process.kill()
        if has_session:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        kill()
        process.wait(timeout=SECONDS)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def finished(words: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """A process that has come to its end, and its output. Nothing that it started is left."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ended(started(words, **pipes, **options)) as process:
        out, err = process.communicate(timeout=2 * SECONDS)
    return subprocess.CompletedProcess(words, process.returncode, out, err)
