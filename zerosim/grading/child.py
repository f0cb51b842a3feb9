"""The two processes of a grade: in one an answer runs (`main`), the other judges what it left (`judge`). Both send
messages to the parent (`process.py`).

An answer may print: stdout and stderr are one pipe, whose text is shown. Messages take another pipe, a line of JSON
each. Between them are lines of faulthandler, about a crash or a thread that holds the interpreter.

    ["alive"]              it is still running
    ["runs", label]        a case begins
    ["borrowed", name]     the answer has called zerosim's own solution
    ["left", text]         the end of the answer's process: its results, in base64
    ["verdict", text]      the end of the judge's process; the answer's cannot send one
    ["failed", text]       the end, by an error of the grader itself
"""

from __future__ import annotations

import base64
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
from zerosim.grading.exercise import Exercise
from zerosim.grading.handin_code import made
from zerosim.grading.judge import left_by, verdict_on
from zerosim.grading.limits import LIMIT_S, Watch
from zerosim.grading.pickling import unpack
from zerosim.grading.plain import packed
from zerosim.grading.variants import variant
from zerosim.grading.verdict import VERDICTS

MOST_BYTES = 4 << 30
"""The bytes that an answer may allocate beyond those at its start, if the system can limit them (Linux)."""

_leave = os._exit


def main(parcel: dict[str, Any]) -> NoReturn:
    """Run the answer that `process.py` sent, report what it left, and end; its remaining threads end too."""
    out = _own_pipe()
    sys.path[:] = parcel["path"]
    for name, lines in parcel["files"].items():
        linecache.cache[name] = (len(lines), None, lines, name)
    _bar_the_door()
    _limit_memory()
    if "source" in parcel:
        _limit_hand_in()

    def alive() -> None:
        _tell(out, "alive")
        with contextlib.suppress(RuntimeError):  # no memory for its thread: the parent waits as well
            faulthandler.dump_traceback_later(parcel["silence_s"], exit=True, file=out)

    alive()
    try:
        data = left_by(
            lambda: made(*parcel["source"]) if "source" in parcel else unpack(parcel["answer"]),
            _exercise(parcel),
            Watch(alive),
            begin=lambda label: _tell(out, "runs", label),
            note=lambda name: _tell(out, "borrowed", name),
            audit=sys.addaudithook,
        )
        _tell(out, "left", base64.b64encode(data).decode())
    except BaseException:
        _tell(out, "failed", traceback.format_exc())
    _leave(0)


def judge(parcel: dict[str, Any]) -> NoReturn:
    """Judge what the answer's process left, and end."""
    out = _own_pipe()
    try:
        data = base64.b64decode(parcel["left"])
        verdict = verdict_on(data, _exercise(parcel), parcel["borrowed"], Watch(lambda: _tell(out, "alive")))
        _tell(out, "verdict", base64.b64encode(packed(verdict, VERDICTS)).decode())
    except BaseException:
        _tell(out, "failed", traceback.format_exc())
    _leave(0)


def _own_pipe() -> BinaryIO:
    """Return the pipe for messages; other output to stdout goes to stderr."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    faulthandler.enable(out)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    return out


def _exercise(parcel: dict[str, Any]) -> Exercise:
    wanted = parcel["exercise"]
    return variant(find_exercise(unpack(wanted) if isinstance(wanted, bytes) else wanted), parcel.get("seed", 0))


def _tell(out: BinaryIO, *message: Any) -> None:
    try:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()
    except OSError:  # the parent is gone
        _leave(1)


def _bar_the_door() -> None:
    """Replace os._exit, which would end the process without a word, by an exception, which has a line."""

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


def _limit_hand_in() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        cpu_s = int(2 * LIMIT_S)
        for what, most in ((resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_FSIZE, 16 << 20), (resource.RLIMIT_CORE, 0)):
            resource.setrlimit(what, (most, most))
