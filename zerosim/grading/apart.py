"""An answer judged in a process of its own: started, listened to, and ended whatever it does.

Inside one process nothing can end a thread that never gives the interpreter back (`sum(iter(int, 1))`), and what
ends the process (a crash in C code) ends the notebook. So a fresh interpreter is started, the answer goes there
as bytes (`carrying.py`), and `inside.py` judges it. It takes about half a second to start. A fork would take less,
but a notebook's kernel has threads, whose locks a fork leaves held for ever, and neither macOS's libraries nor
Windows know it; and it would take along whatever has been changed in zerosim.

Owns the process, and listens to it. What is said of one that ended without a verdict is `lost.py`'s.
"""

from __future__ import annotations

import codecs
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import IO, Any

from zerosim.errors import InputError, ZerosimError
from zerosim.grading.carrying import pack
from zerosim.grading.catalogue import EXERCISES
from zerosim.grading.exercise import Check, Exercise, Verdict
from zerosim.grading.lost import Last, lost
from zerosim.grading.watch import LIMIT_S, POLL_S, SILENCE_S, Lap

START_S = 60.0
"""How long a process may take to say its first word: a cold disk, a busy machine."""

LINGER_S = 1.0
"""How long its pipes may stay open once the verdict is there: what it started itself may hold them."""

MOST_SHOWN = 20_000
"""Characters of what an answer prints that are shown."""

_MARK = "ZEROSIM_GRADING"
_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_BEGIN = """\
import importlib, pickle, sys, typing
parcel = pickle.load(sys.stdin.buffer)
sys.path.insert(0, parcel["home"])
import zerosim
del sys.path[0]
sys.path += parcel["path"]
from zerosim.grading.inside import main
main(parcel)
"""
"""This very zerosim first, then what it imports, then the folders of the answer: a queue.py there is the answer's."""
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def judged_apart(answer: Any, one: Exercise) -> Verdict:
    """The verdict on an answer, from a process of its own. What it prints is shown as it comes.

    Raises: ZerosimError where no such process can be had. KeyboardInterrupt ends it.
    """
    if os.environ.get(_MARK):
        raise InputError("grade is called by what is being graded: call it outside of the answer")
    try:
        parcel, files = pack(answer)
    except InputError as error:
        hint = "make it where it is used, or use plain values: the answer runs in a process of its own"
        return Verdict((Check("answer", False, "an answer that stands by itself", str(error), hint=hint),))
    wanted = one.name if one in EXERCISES else pack(one)[0]
    sent = {
        "home": _HOME,
        "path": sys.path,
        "files": files,
        "exercise": wanted,
        "answer": parcel,
        "silence_s": SILENCE_S,
    }
    with _process() as process:
        said = _hear(process, pickle.dumps(sent))
        if said.verdict is not None:
            return Verdict.of(said.verdict)
        if said.fault:
            raise ZerosimError(f"grade itself failed, which is no fault of the answer's:\n{said.fault}")
        if not said.has_begun:
            raise ZerosimError(f"grade starts {sys.executable} in a process of its own, which did not begin to work")
        return lost(one, Last(said.label, said.dump, _code(process), list(files), SILENCE_S))


def _code(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit code; None where it goes on."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(LINGER_S)
    return None


# -- the process ------------------------------------------------------------------------------------
@contextmanager
def _process() -> Iterator[subprocess.Popen[bytes]]:
    """A fresh interpreter. When this is left it has ended, and what it may have started too (not on Windows)."""
    environment = {**os.environ, _MARK: "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}
    environment.update(dict.fromkeys(_ONE_THREAD, "1"))
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-c", _BEGIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends that one
            creationflags=flags,
        )
    except (OSError, TypeError) as error:  # TypeError: this program has no Python to start
        raise ZerosimError(f"grade starts Python in a process of its own, which failed: {error}") from None
    try:
        yield process
    finally:
        with suppress(OSError):
            if sys.platform != "win32":
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()


# -- listening --------------------------------------------------------------------------------------
Heard = SimpleQueue[tuple[str, str]]


class _Said:
    """What has been heard so far. What is printed is shown at once."""

    def __init__(self) -> None:
        self.streams_left = 2
        self.has_begun = False
        self.label = ""
        self.verdict: dict[str, Any] | None = None
        self.fault = ""
        self.dump: list[str] = []
        self._line_is_open = False

    @property
    def timeout_s(self) -> float:
        """How long it may be silent from here on. The process itself takes half of that for a fault."""
        return LINGER_S if self.verdict or self.fault else 2 * SILENCE_S if self.has_begun else START_S

    def take(self, kind: str, text: str) -> bool:
        """True for a sign of life."""
        if kind == "end":
            self.streams_left -= 1
        elif kind == "printed":
            self.show(text)
        elif kind == "said" and not text.startswith("["):
            self.dump.append(text)
        elif kind == "said":
            with suppress(ValueError, TypeError):  # a line that is none of ours
                self._message(*json.loads(text))
                return True
        return False

    def _message(self, what: str, *rest: Any) -> None:
        self.has_begun = True
        if what == "runs":
            self.label = rest[0]
        elif what == "verdict":
            self.verdict = rest[0]
        elif what == "failed":
            self.fault = rest[0]

    def show(self, text: str) -> None:
        sys.stdout.write(text)
        self._line_is_open = not text.endswith("\n")

    def close_line(self) -> None:
        if self._line_is_open:
            self.show("\n")


def _hear(process: subprocess.Popen[bytes], sent: bytes) -> _Said:
    """Listen until it has ended, or has been silent for too long."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    heard: Heard = SimpleQueue()
    for read, stream in ((_read_messages, process.stdout), (_read_printed, process.stderr)):
        threading.Thread(target=read, args=(stream, heard), daemon=True).start()
    with suppress(OSError):  # it has ended already
        process.stdin.write(sent)
        process.stdin.close()
    said, lap, passed_s, silent_s = _Said(), Lap(), 0.0, 0.0
    try:
        while said.streams_left and silent_s < said.timeout_s and passed_s < START_S + 2 * LIMIT_S:
            try:
                lives = said.take(*heard.get(timeout=POLL_S))
            except Empty:
                lives = False
            seconds = lap.seconds()
            passed_s, silent_s = passed_s + seconds, 0.0 if lives else silent_s + seconds
    finally:
        said.close_line()
    return said


def _read_messages(stream: IO[bytes], heard: Heard) -> None:
    with stream:
        for line in stream:
            heard.put(("said", line.decode("utf-8", "replace").rstrip()))
    heard.put(("end", ""))


def _read_printed(stream: IO[bytes], heard: Heard) -> None:
    """Passes on what may be shown, and counts the rest."""
    decode, left, more = codecs.getincrementaldecoder("utf-8")("replace").decode, MOST_SHOWN, 0
    with stream:
        while piece := os.read(stream.fileno(), 1 << 16):
            text = decode(piece)
            shown, left, more = text[:left], left - len(text[:left]), more + len(text[left:])
            if shown:
                heard.put(("printed", shown))
    if more:
        heard.put(("printed", f"\n... and {more:,} characters more\n"))
    heard.put(("end", ""))
