"""An answer whose process ended without a verdict: its last action, and the line if it is known.

Read from faulthandler's output: the line is that of the thread that crashed, or that held the interpreter.
"""

from __future__ import annotations

import re
import signal
from typing import NamedTuple

from zerosim.grading.exercise import Exercise
from zerosim.grading.own_code import is_own, line_words
from zerosim.grading.verdict import Check, Verdict

_THREAD = re.compile(r"(Current )?[Tt]hread 0x")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_FATAL = re.compile(r"(?:Fatal Python error|Windows fatal exception): (.*)")
_KILLED = -9


class _Frame(NamedTuple):
    file: str
    number: int
    function: str


def lost(one: Exercise, label: str, dump: list[str], code: int | None, files: list[str], silence_s: float) -> Verdict:
    """Return the verdict: the current check fails, and the later ones were not reached.

    label       the current case; '' if there was none yet
    dump        the lines that faulthandler wrote
    code        the process's exit code; None where it went on until it was ended
    files       those that the student's code comes from
    silence_s   how long it may hold the interpreter
    """
    case = next((case for case in one.cases if case.label == label), None)
    name = "runs" if case is not None or one.examine is None else one.examine.name
    expected = case.expected if case is not None else "an answer that ends"
    counted, hint = _words(dump, code, silence_s)
    line, frame = "", _frame(dump, files)
    if frame is not None:
        counted, line = f"{counted}, in {frame.function}", line_words(frame.file, frame.number)
    check = Check(name, False, expected, counted, label, line, hint)
    return Verdict((check, *(Check(name, None) for name, _ in one.judges)))


def _words(dump: list[str], code: int | None, silence_s: float) -> tuple[str, str]:
    """Return what happened, and a hint."""
    if any(line.startswith("Timeout") for line in dump):
        hint = "a call that never returns, such as sum() or list() over an endless iterator, or C code that waits"
        return f"did not end within {silence_s:g} s and blocked everything else", hint
    if code is None:
        return "did not end and stopped responding", "did it stop its own process?"
    fatal = next((found[1] for line in dump if (found := _FATAL.match(line))), "")
    if not fatal and code >= 0:
        return f"ended the process with exit code {code}", "an answer must return or raise, not end its process"
    hint = "C code accessed invalid memory (ctypes?), or a recursion was endless"
    if code == _KILLED:
        hint = "the system ended it: out of memory?"
    return f"ended the process: {fatal.lower() or _signal_name(code)}", hint


def _signal_name(code: int) -> str:
    try:
        return f"{signal.Signals(-code).name}, {signal.strsignal(-code)}"
    except ValueError:
        return f"signal {-code}"


def _frame(dump: list[str], files: list[str]) -> _Frame | None:
    """Return the student's innermost frame of the thread that crashed, else of one that is in a line of theirs."""
    names = {name.encode("ascii", "backslashreplace").decode(): name for name in files}  # by their names in the dump
    threads: list[tuple[bool, list[_Frame]]] = []
    for line in dump:
        if (thread := _THREAD.match(line)) is not None:
            threads.append((bool(thread[1]), []))
        elif threads and (found := _FRAME.match(line)) is not None:
            threads[-1][1].append(_Frame(names.get(found[1], found[1]), int(found[2]), found[3]))

    def is_students(frame: _Frame) -> bool:
        return frame.file in files or (is_own(frame.file) and not frame.file.startswith("<"))

    threads.sort(key=lambda thread: (not thread[0], not (thread[1] and is_students(thread[1][0]))))
    return next((frame for _, frames in threads for frame in frames if is_students(frame)), None)
