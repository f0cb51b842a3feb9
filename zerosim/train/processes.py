"""Processes with their own session: start them, and end them together with all their children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence


def start(command: Sequence[str], env: Mapping[str, str], stdout: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """Start a process without input. Its errors go to a pipe as text. Raises: OSError if it cannot start."""
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    """End such a process, and close its pipes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)  # its session outlives it as long as a child lives
        else:
            process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
