"""Processes with a session of their own: started, and ended together with all that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence


def start(command: Sequence[str], env: Mapping[str, str], stdout: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """Start a process that reads nothing. Its errors are text in a pipe. Raises: OSError where none can be started."""
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
    """End a process that was started so, and close its pipes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)  # its session outlives it while anything that it started does
        else:
            process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
