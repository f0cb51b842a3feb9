"""An answer's own process: started, listened to, and ended whatever it does. Another process judges it.

Within one process nothing can end a thread that never releases the interpreter (`sum(iter(int, 1))`), and a crash in C
code ends the notebook. So a fresh interpreter starts, the answer goes there as bytes (`pickling.py`), and `child.py`
runs it. Starting takes about half a second. A fork would take less, but a notebook's kernel has threads, whose locks a
fork leaves held for good, neither macOS's libraries nor Windows support it, and it would carry along any change made to
zerosim.

A second interpreter starts at the same time and judges the first one's results (`judge.py`): the answer never runs in
it, and it takes only plain data from the first. A verdict sent by the first is not accepted.

Reports on a process that ended without a verdict are in `crashes.py`.
"""

from __future__ import annotations

import base64
import codecs
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import IO, Any

from zerosim.errors import InputError, ZerosimError, printable
from zerosim.grading.catalogue import EXERCISES
from zerosim.grading.crashes import lost
from zerosim.grading.exercise import Exercise
from zerosim.grading.limits import LIMIT_S, POLL_S, SILENCE_S, Lap
from zerosim.grading.pickling import pack
from zerosim.grading.plain import unpacked
from zerosim.grading.verdict import VERDICTS, Check, Verdict

START_S = 60.0
"""How long a process may take to send its first message: a cold disk, a busy machine."""

LINGER_S = 1.0
"""How long its pipes may stay open after the verdict: processes that it started may hold them."""

MOST_SHOWN = 20_000
"""The most characters of an answer's output that are shown."""

ANSWERS = {"alive": (), "runs": (str,), "borrowed": (str,), "left": (str,), "failed": (str,)}
JUDGES = {"alive": (), "verdict": (str,), "failed": (str,)}
"""The messages of each process, with their parts: each message is a sign of life."""

Messages = Mapping[str, tuple[type, ...]]

_MARK = "ZEROSIM_GRADING"
_HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_BEGIN = """\
import importlib, pickle, sys, typing
home, path = pickle.load(sys.stdin.buffer)
sys.path.insert(0, home)
import zerosim
del sys.path[0]
sys.path += path
from zerosim.grading import child
{0}(pickle.load(sys.stdin.buffer))
"""
"""This very zerosim first, then its imports, then the folders of the answer: a queue.py there is the answer's."""
_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT", "TEMP")
"""Environment variables that a hand-in's processes get."""
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def judged_in_process(answer: Any, one: Exercise, seed: int = 0) -> Verdict:
    """Return the verdict on an answer, from its own process. Its output is shown as it comes.

    Raises: ZerosimError if no such process can start. KeyboardInterrupt ends it.
    """
    if os.environ.get(_MARK):
        raise InputError("the answer itself calls grade: call it outside the answer")
    try:
        parcel, files = pack(answer)
    except InputError as error:
        hint = "create it where it is used, or use plain values: the answer runs in a separate process"
        return Verdict((Check("answer", False, "a self-contained answer", str(error), hint=hint),))
    exercise = one.name if seed or one in EXERCISES else pack(one)[0]
    return _judged({"path": sys.path, "files": files, "answer": parcel, "seed": seed}, one, exercise)


def judged_source(name: str, source: str, one: Exercise, seed: int = 0) -> Verdict:
    """Return the verdict on an answer in the text of a file, to an exercise as `seed` has it.

    The answer runs in its own process, folder and environment, with limits of memory, processor time and file sizes
    (not on Windows).
    """
    sent = {"path": [place for place in sys.path if place], "files": {name: source.splitlines(keepends=True)}}
    with tempfile.TemporaryDirectory(prefix="zerosim-") as folder:
        answer = {"source": (name, source, one.given.__name__), "seed": seed}
        return _judged({**sent, **answer}, one, one.name, folder)


def _judged(sent: dict[str, Any], one: Exercise, exercise: str | bytes, folder: str | None = None) -> Verdict:
    sent |= {"exercise": exercise, "silence_s": SILENCE_S}
    env = _environment(folder)
    with _process("child.main", env, folder) as process, _process("child.judge", env) as judge, ExitStack() as unheard:
        for pipe in (judge.stdout, judge.stderr):
            assert pipe is not None
            unheard.callback(pipe.close)
        heard = _listen(process, ANSWERS, sent)
        if "left" in heard:
            unheard.pop_all()  # the listener closes them
            borrowed = {name for (name,) in heard["borrowed"]}
            what = {"exercise": exercise, "seed": sent.get("seed", 0), "left": heard["left"][0], "borrowed": borrowed}
            found = _listen(judge, JUDGES, what)
            if "verdict" in found:
                verdict: Verdict = unpacked(base64.b64decode(found["verdict"][0]), VERDICTS)
                return verdict
            heard = {**found, "failed": found.get("failed", [f"it ended without a message: {found['dump']}"])}
        if "failed" in heard:
            raise ZerosimError(f"grade itself failed; the answer is not at fault:\n{heard['failed'][0]}")
        if "alive" not in heard:
            raise ZerosimError(f"grade starts {sys.executable} in a separate process, which did not start")
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(LINGER_S)
        return lost(one, heard.get("runs", [""])[0], heard["dump"], code, list(sent["files"]), SILENCE_S)


def _environment(folder: str | None) -> dict[str, str]:
    """Return the environment of both processes: a variable may choose the kernels of BLAS, and with them the bits. A
    hand-in, which has a folder, gets none of this process's variables."""
    env = dict(os.environ)
    if folder is not None:
        env = {name: env[name] for name in _KEPT if name in env} | {"HOME": folder, "TMPDIR": folder}
    return {**env, _MARK: "1", "PYTHONIOENCODING": "utf-8:backslashreplace", **_ONE_THREAD}


@contextmanager
def _process(main: str, env: dict[str, str], folder: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Start a fresh interpreter, in a folder, for one of `child.py`'s functions. At the block's end it has ended, and
    so have processes that it started (not on Windows)."""
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-c", _BEGIN.format(main)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=env,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the other
            creationflags=flags,
        )
    except (OSError, TypeError) as error:  # TypeError: this program has no Python to start
        raise ZerosimError(f"grade starts Python in a separate process, which failed: {error}") from None
    try:
        _send(process, (_HOME, sys.path))
        yield process
    finally:
        with suppress(OSError):
            if sys.platform != "win32":
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()


def _send(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    with suppress(OSError):  # it has ended already
        process.stdin.write(pickle.dumps(value))
        process.stdin.flush()


def _listen(process: subprocess.Popen[bytes], messages: Messages, parcel: dict[str, Any]) -> dict[str, list[Any]]:
    """Send it its parcel, show its output, and listen until it has ended or has been silent for too long.

    Return its last message of each kind (`child.py`), all of those on borrowed functions, and under 'dump'
    faulthandler's lines.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    queue: SimpleQueue[list[Any]] = SimpleQueue()

    def read(rows: Iterator[list[Any]]) -> None:
        for row in rows:
            queue.put(row)
        queue.put(["end"])

    for rows in (_messages(process.stdout, messages), _printed(process.stderr)):
        threading.Thread(target=read, args=(rows,), daemon=True).start()
    _send(process, parcel)
    heard: dict[str, list[Any]] = {"dump": [], "borrowed": []}
    lap, passed_s, silent_s, streams_left, line_is_open = Lap(), 0.0, 0.0, 2, False
    try:
        while streams_left and silent_s < _timeout_s(heard) and passed_s < START_S + 2 * LIMIT_S:
            try:
                kind, *rest = queue.get(timeout=POLL_S)
            except Empty:
                kind, rest = "", []
            seconds = lap.seconds()
            passed_s, silent_s = passed_s + seconds, silent_s + seconds
            if kind == "end":
                streams_left -= 1
            elif kind == "printed":
                sys.stdout.write(rest[0])
                line_is_open = not rest[0].endswith("\n")
            elif kind == "dump":
                heard["dump"] += rest
            elif kind == "borrowed":
                heard[kind].append(rest)
            elif kind in messages:
                heard[kind], silent_s = rest, 0.0
    finally:
        if line_is_open:
            sys.stdout.write("\n")
    return heard


def _timeout_s(heard: dict[str, list[Any]]) -> float:
    """Return how long it may be silent from here on. The process itself takes half of that for a fault."""
    if {"left", "verdict", "failed"} & set(heard):
        return LINGER_S
    return 2 * SILENCE_S if "alive" in heard else START_S


def _messages(stream: IO[bytes], known: Messages) -> Iterator[list[Any]]:
    """Yield its messages of the kinds that it may send; any other line is faulthandler's."""
    with stream:
        for line in stream:
            text = line.decode("utf-8", "replace").rstrip()
            if not text.startswith("["):
                yield ["dump", printable(text)]
                continue
            with suppress(ValueError):  # not a line of ours
                message = json.loads(text)
                if isinstance(message, list) and message and known.get(message[0]) == tuple(map(type, message[1:])):
                    yield [printable(part) for part in message]  # all parts are texts


def _printed(stream: IO[bytes]) -> Iterator[list[Any]]:
    """Return the part of the output that is shown, its control characters spelled out, and a count of the rest."""
    decode, left, more = codecs.getincrementaldecoder("utf-8")("replace").decode, MOST_SHOWN, 0
    with stream:
        while piece := os.read(stream.fileno(), 1 << 16):
            text = decode(piece).replace("\r\n", "\n")
            shown, left, more = text[:left], left - len(text[:left]), more + len(text[left:])
            if shown:
                yield ["printed", "\t".join(map(printable, shown.split("\t")))]
    if more:
        yield ["printed", f"\n... and {more:,} characters more\n"]
