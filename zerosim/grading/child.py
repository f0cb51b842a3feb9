"""The process in which an answer runs: it judges, and sends messages to the one that waits (`process.py`).

An answer may print: stdout and stderr are one pipe, whose text is shown. Messages take another, a line of JSON each.
Between them stands what faulthandler writes of a crash, or of a thread that does not let go of the interpreter.

    ["alive"]              nothing new, and it goes on
    ["runs", label]        a case begins
    ["verdict", [...]]     the end
    ["failed", text]       the end: the grader itself is at fault
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import linecache
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from zerosim.grading.catalogue import find_exercise
from zerosim.grading.judge import judged
from zerosim.grading.limits import Watch
from zerosim.grading.pickling import unpack

MOST_BYTES = 4 << 30
"""What an answer may take beyond what is there when it begins, where the system can be told so (Linux)."""

_leave = os._exit


def main(parcel: dict[str, Any]) -> NoReturn:
    """Judge what `process.py` sent, say so, and end; whatever threads the answer left behind end with it."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    faulthandler.enable(out)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one outside, which ends this one
    sys.path[:] = parcel["path"]
    for name, lines in parcel["files"].items():
        linecache.cache[name] = (len(lines), None, lines, name)
    _bar_the_door()
    _limit_memory()

    def alive() -> None:
        _tell(out, "alive")
        with contextlib.suppress(RuntimeError):  # no room for its thread: the one outside waits as well
            faulthandler.dump_traceback_later(parcel["silence_s"], exit=True, file=out)

    alive()
    try:
        wanted = parcel["exercise"]
        one = find_exercise(unpack(wanted) if isinstance(wanted, bytes) else wanted)
        verdict = judged(
            lambda: unpack(parcel["answer"]), one, Watch(alive), begin=lambda label: _tell(out, "runs", label)
        )
        _tell(out, "verdict", verdict)
    except BaseException:
        _tell(out, "failed", traceback.format_exc())
    _leave(0)


def _tell(out: BinaryIO, *message: Any) -> None:
    try:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()
    except OSError:  # nobody is there any more
        _leave(1)


def _bar_the_door() -> None:
    """os._exit ends a process without a word. Here it is an exception, which has a line."""

    def refused(status: int = 0) -> None:
        raise SystemExit(f"os._exit({status})")

    for module in (os, sys.modules[os.name if os.name == "nt" else "posix"]):
        vars(module)["_exit"] = refused


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text("utf-8").split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, hard))
