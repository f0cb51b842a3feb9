"""Processes that tests start: none is waited for without end, and none is left behind."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

SECONDS = 120.0

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX: a shell, signals, links or modes of files")


@contextmanager
def ended(process: subprocess.Popen[Any], seconds: float = SECONDS) -> Iterator[subprocess.Popen[Any]]:
    """The process is gone at the end of the block; within it, after `seconds` at the latest: no read of it hangs."""
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.wait(timeout=SECONDS)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
